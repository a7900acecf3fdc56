"""The named ops: those that mix tokens, and the fusions that compiler passes put into a graph.

And those around the decode graph (`decode_step`).
"""

from __future__ import annotations

from minivllm.ops.attention import ATTENTION
from minivllm.ops.causal_conv1d import (
    CAUSAL_CONV1D,
    CAUSAL_CONV1D_DECODE,
    CAUSAL_CONV1D_PREFILL,
)
from minivllm.ops.causal_conv1d_slots import (
    CAUSAL_CONV1D_DECODE_SLOTS,
    CAUSAL_CONV1D_PREFILL_SLOTS,
    CAUSAL_CONV1D_QKV_PREFILL_SLOTS,
)
from minivllm.ops.decode_step import DECODE_INPUTS, GREEDY_TOKENS
from minivllm.ops.fused_gated_delta_rule import (
    FUSED_GATED_DELTA_RULE,
    FUSED_GATED_DELTA_RULE_DECODE,
    FUSED_GATED_DELTA_RULE_PREFILL,
)
from minivllm.ops.gated_delta_rule import (
    GATED_DELTA_RULE,
    GATED_DELTA_RULE_DECODE,
    GATED_DELTA_RULE_PREFILL,
)
from minivllm.ops.gated_delta_rule_slots import (
    FUSED_GATED_DELTA_RULE_DECODE_SLOTS,
    FUSED_GATED_DELTA_RULE_PREFILL_SLOTS,
)
from minivllm.ops.gating import SIGMOID_MUL, SILU_MUL
from minivllm.ops.linear import (
    GATED_RMS_NORM_LINEAR_ADD_RMS_NORM,
    LINEAR,
    LINEAR_ADD_RMS_NORM,
    LINEAR_SILU_MUL,
    SIGMOID_MUL_LINEAR_ADD_RMS_NORM,
)
from minivllm.ops.op import Implementation, Op
from minivllm.ops.paged_attention import (
    PAGED_ATTENTION_DECODE,
    PAGED_ATTENTION_PREFILL,
    PAGED_KV_WRITE,
)
from minivllm.ops.qk_norm_rope import QK_NORM_ROPE
from minivllm.ops.rms_norm import ADD_RMS_NORM, GATED_RMS_NORM, RMS_NORM

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
        RMS_NORM,
        ADD_RMS_NORM,
        GATED_RMS_NORM,
        SILU_MUL,
        SIGMOID_MUL,
        QK_NORM_ROPE,
        FUSED_GATED_DELTA_RULE,
        FUSED_GATED_DELTA_RULE_PREFILL,
        FUSED_GATED_DELTA_RULE_DECODE,
        CAUSAL_CONV1D_PREFILL_SLOTS,
        CAUSAL_CONV1D_QKV_PREFILL_SLOTS,
        CAUSAL_CONV1D_DECODE_SLOTS,
        FUSED_GATED_DELTA_RULE_PREFILL_SLOTS,
        FUSED_GATED_DELTA_RULE_DECODE_SLOTS,
        LINEAR,
        LINEAR_SILU_MUL,
        LINEAR_ADD_RMS_NORM,
        GATED_RMS_NORM_LINEAR_ADD_RMS_NORM,
        SIGMOID_MUL_LINEAR_ADD_RMS_NORM,
        DECODE_INPUTS,
        GREEDY_TOKENS,
    )
}

__all__ = ["OPS", "Implementation", "Op"]
