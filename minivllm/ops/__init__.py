"""The named ops that mix tokens, and nothing else: all other work of the model is plain torch."""

from __future__ import annotations

from minivllm.ops.attention import (
    ATTENTION,
    PAGED_ATTENTION_DECODE,
    PAGED_ATTENTION_PREFILL,
    PAGED_KV_WRITE,
)
from minivllm.ops.causal_conv1d import (
    CAUSAL_CONV1D,
    CAUSAL_CONV1D_DECODE,
    CAUSAL_CONV1D_PREFILL,
)
from minivllm.ops.gated_delta_rule import (
    GATED_DELTA_RULE,
    GATED_DELTA_RULE_DECODE,
    GATED_DELTA_RULE_PREFILL,
)
from minivllm.ops.op import Implementation, Op

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        CAUSAL_CONV1D,
        CAUSAL_CONV1D_PREFILL,
        CAUSAL_CONV1D_DECODE,
        GATED_DELTA_RULE,
        GATED_DELTA_RULE_PREFILL,
        GATED_DELTA_RULE_DECODE,
        ATTENTION,
        PAGED_KV_WRITE,
        PAGED_ATTENTION_PREFILL,
        PAGED_ATTENTION_DECODE,
    )
}

__all__ = ["OPS", "Implementation", "Op"]
