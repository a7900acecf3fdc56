"""The parity tests notice: each known way to get the model or its state wrong, tried once.

A mutation is applied to the model or to the lowering, in eager mode (the fusing passes would refuse
a model that they do not know), and the comparison with transformers must
fail. A mutation that passes would mean that the parity tests prove less than they claim.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import random_model, save, with_tiny_keys
from test_parity import check_parity, engine
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from minivllm.compiler.passes import lower_mixers
from minivllm.compiler.passes.canonicalize import remove_unused
from minivllm.model import miniqwen
from minivllm.runtime.model_runner import ModelRunner

TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}

Patch = Callable[[pytest.MonkeyPatch], None]


def weight_for_one_plus_weight(patch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (x32 * self.weight.float()).to(x.dtype)

    patch.setattr(miniqwen.RMSNorm, "forward", forward)


def one_plus_weight_in_the_gated_norm(patch: pytest.MonkeyPatch) -> None:
    forward = miniqwen.GatedRMSNorm.forward

    def wrong(self: Any, x: Tensor, gate: Tensor) -> Tensor:
        return forward(self, x, gate) + forward(self, x, gate) / self.weight

    patch.setattr(miniqwen.GatedRMSNorm, "forward", wrong)


def epsilon_outside_the_root(patch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 / (x32.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)
        return (x32 * (1.0 + self.weight.float())).to(x.dtype)

    patch.setattr(miniqwen.RMSNorm, "forward", forward)


def l2_epsilon_outside_the_root(patch: pytest.MonkeyPatch) -> None:
    def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
        return x / (x.norm(dim=-1, keepdim=True) + eps)

    patch.setattr(miniqwen, "l2_normalize", l2_normalize)


def rope_turns_all_dims(patch: pytest.MonkeyPatch) -> None:
    def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        repeats = x.shape[-1] // cos.shape[-1]
        cos, sin = cos.repeat(1, 1, repeats), sin.repeat(1, 1, repeats)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    patch.setattr(miniqwen, "apply_rotary", apply_rotary)


def rope_interleaved(patch: pytest.MonkeyPatch) -> None:
    apply_rotary = miniqwen.apply_rotary

    def wrong(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        size = cos.shape[-1]
        turned = x[..., :size].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return apply_rotary(torch.cat([turned, x[..., size:]], dim=-1), cos, sin)

    patch.setattr(miniqwen, "apply_rotary", wrong)


def gate_and_query_swapped(patch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        gate, q = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q = miniqwen.apply_rotary(self.q_norm(q), cos, sin)
        k = miniqwen.apply_rotary(self.k_norm(k), cos, sin)
        o = miniqwen.ops.attention(q, k, v, self.head_dim**-0.5)
        return self.o_proj((o * gate.sigmoid()).flatten(-2))

    patch.setattr(miniqwen.GatedAttention, "forward", forward)


def a_log_exponentiated_twice(patch: pytest.MonkeyPatch) -> None:
    class TwiceExponentiated:
        """Stands in for `A_log` in `-A_log.float().exp()`."""

        def __init__(self, value: Tensor) -> None:
            self.value = value

        def float(self) -> Tensor:
            return self.value.float().exp()

    forward = miniqwen.GatedDeltaNet.forward

    def wrong(self: Any, x: Tensor) -> Tensor:
        parameter = self._parameters.pop("A_log")
        object.__setattr__(self, "A_log", TwiceExponentiated(parameter))
        try:
            return forward(self, x)
        finally:
            object.__delattr__(self, "A_log")
            self.register_parameter("A_log", parameter)

    patch.setattr(miniqwen.GatedDeltaNet, "forward", wrong)


def _lowered_without_its_write(kind: str) -> Patch:
    def patch_pass(patch: pytest.MonkeyPatch) -> None:
        run = lower_mixers.LowerMixers.run

        def wrong(self: Any, graph: Any, context: Any) -> list[str]:
            sites = run(self, graph, context)
            for node in graph.nodes(torch.ops.aten.index_copy_.default):
                pool, dim, slots, _ = node.args
                if pool.target.endswith(kind):
                    old = graph.call(torch.ops.aten.index_select.default, pool, 0, slots, like=node)
                    node.args = (pool, dim, slots, old)
            remove_unused(graph)  # what was to be written: a pass leaves nothing unread
            return sites

        patch.setattr(lower_mixers.LowerMixers, "run", wrong)

    return patch_pass


def _before_every_step(change: Callable[[Tensor], Any]) -> Patch:
    """What changes the pool of slots before each prefill and decode."""

    def patch_runner(patch: pytest.MonkeyPatch) -> None:
        for run in (ModelRunner.prefill, ModelRunner.decode):

            def wrong(self: Any, rows: Any, run: Any = run) -> Tensor:
                change(self.slots.storage)
                return run(self, rows)

            patch.setattr(ModelRunner, run.__name__, wrong)

    return patch_runner


every_step_starts_from_zero = _before_every_step(lambda slots: slots.zero_())
steps_alternate_between_two_slots = _before_every_step(
    lambda slots: slots[1:3].copy_(slots[1:3].flip(0))
)


def gate_before_the_norm(patch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor, gate: Tensor) -> Tensor:
        x32 = x.float() * F.silu(gate.float())
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * x32).to(x.dtype)

    patch.setattr(miniqwen.GatedRMSNorm, "forward", forward)


MUTATIONS: dict[str, Patch] = {
    "weight_for_one_plus_weight": weight_for_one_plus_weight,
    "one_plus_weight_in_the_gated_norm": one_plus_weight_in_the_gated_norm,
    "epsilon_outside_the_root": epsilon_outside_the_root,
    "l2_epsilon_outside_the_root": l2_epsilon_outside_the_root,
    "rope_turns_all_dims": rope_turns_all_dims,
    "rope_interleaved": rope_interleaved,
    "gate_and_query_swapped": gate_and_query_swapped,
    "gate_before_the_norm": gate_before_the_norm,
    "a_log_exponentiated_twice": a_log_exponentiated_twice,
    "conv_state_dropped": _lowered_without_its_write("conv"),
    "recurrent_state_dropped": _lowered_without_its_write("recurrent"),
    "every_step_starts_from_zero": every_step_starts_from_zero,
    "steps_alternate_between_two_slots": steps_alternate_between_two_slots,
}


Oracles = dict[str, tuple[Qwen3_5ForCausalLM, Path]]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Oracles:
    """Plain, and one in which epsilons decide."""
    models = {
        "plain": random_model(**TWO_LAYERS),
        "epsilon": with_tiny_keys(random_model(rms_norm_eps=0.1, **TWO_LAYERS)),
    }
    return {name: (m, save(m, tmp_path_factory.mktemp(name))) for name, m in models.items()}


@pytest.mark.parametrize("name", ["plain", "epsilon"])
def test_without_a_mutation_all_is_well(name: str, oracles: Oracles) -> None:
    model, folder = oracles[name]
    check_parity(model, engine(folder, "eager"))


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_noticed(
    name: str, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = oracles["epsilon" if "epsilon" in name else "plain"]
    MUTATIONS[name](monkeypatch)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check_parity(model, engine(folder, "eager"))
