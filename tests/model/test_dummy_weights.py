"""`dummy_weights`: what values depend on, their distributions, activations of a deep model."""

from __future__ import annotations

import pytest
import torch
from hf_checkpoints import (
    TEXT,
    assert_same,
)

import minivllm.model.dummy as dummy
from minivllm.model.config import MiniQwenConfig
from minivllm.model.miniqwen import MiniQwen, RotaryEmbedding
from minivllm.model.weights import (
    dummy_weights,
    parameter_shapes,
)

DEEP = MiniQwenConfig.from_hf(
    {
        "model_type": "qwen3_5_text",
        **TEXT,
        "num_hidden_layers": 24,
        "hidden_size": 128,
        "intermediate_size": 256,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    }
)


def test_dummy_weights_are_seeded_by_name() -> None:
    shapes = parameter_shapes(DEEP)
    first = dummy_weights(shapes, torch.float32, "cpu", seed=1)
    assert {name: tuple(value.shape) for name, value in first.items()} == shapes
    backwards = dict(reversed(shapes.items()))
    assert_same(dummy_weights(backwards, torch.float32, "cpu", seed=1), first)
    some = {"layers.7.mixer.q_proj.weight": shapes["layers.7.mixer.q_proj.weight"]}
    alone = dummy_weights(some, torch.float32, "cpu", seed=1)
    assert torch.equal(alone.popitem()[1], first["layers.7.mixer.q_proj.weight"])
    other = dummy_weights(shapes, torch.float32, "cpu", seed=2)
    assert not any(torch.equal(first[name], other[name]) for name in shapes)
    up, down = (first[f"layers.{i}.mlp.up_proj.weight"] for i in (0, 1))
    assert not torch.equal(up, down)
    half = dummy_weights(shapes, torch.bfloat16, "cpu", seed=1)
    assert_same(half, {name: value.bfloat16() for name, value in first.items()})


def test_dummy_weights_do_not_touch_the_global_generator() -> None:
    state = torch.get_rng_state()
    dummy_weights(parameter_shapes(DEEP), torch.float32, "cpu", seed=-1)
    assert torch.equal(torch.get_rng_state(), state)


def test_dummy_distributions() -> None:
    values = dummy_weights(parameter_shapes(DEEP), torch.float32, "cpu", seed=0)
    linear = [f"layers.{i}.mixer." for i in DEEP.linear_layers]
    rate = torch.cat([values[f"{at}A_log"] for at in linear]).exp()
    step = torch.nn.functional.softplus(torch.cat([values[f"{at}dt_bias"] for at in linear]))
    assert rate.min() >= 1 and rate.max() <= 16
    assert step.min() >= 0.99e-3 and step.max() <= 1.01e-1
    decay = torch.exp(-rate * step)
    assert decay.min() > 0.2 and decay.max() > 0.99 and 0.8 < decay.median() < 0.98
    gated = torch.cat([values[f"{at}norm.weight"] for at in linear])
    plain = torch.cat([values[f"layers.{i}.input_layernorm.weight"] for i in range(24)])
    final = values["norm.weight"]
    for weight, centre in ((gated, 1.0), (plain, 0.0), (final, 0.0)):
        assert abs(weight.mean().item() - centre) < 0.05
        assert 0.07 < weight.std().item() < 0.13
    assert values["embed_tokens.weight"].std().item() == pytest.approx(128**-0.5, rel=0.05)
    assert values["layers.0.mixer.conv1d.weight"].std().item() == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_activations_keep_their_scale_through_24_layers(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        model = MiniQwen(DEEP)
    dummy = dummy_weights(parameter_shapes(DEEP), dtype, "cpu", seed=0)
    model.load_state_dict(dummy, strict=True, assign=True)
    model.rotary_emb = RotaryEmbedding(DEEP)  # its buffer is no parameter
    scales: list[float] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda *args: scales.append(args[-1].float().std().item()))
    with torch.no_grad():
        logits = model(torch.arange(60), torch.arange(60)).float()
    assert torch.isfinite(logits).all()
    assert len(scales) == 24 and min(scales) > 0.1 and max(scales) < 5
    assert 0.3 < logits.std().item() < 3


WIDE = {  # name: shape; pieces of 256 elements end everywhere
    "embed_tokens.weight": (97, 24),
    "layers.0.mlp.up_proj.weight": (40, 24),
    "layers.0.mixer.conv1d.weight": (1031, 4),
    "layers.0.mixer.in_proj_a.weight": (3, 5),
    "layers.1.mixer.q_proj.weight": (1, 2048),
    "layers.1.mixer.k_proj.weight": (257, 1),
    "layers.1.mixer.o_proj.weight": (259, 5),
    "layers.0.mixer.A_log": (16,),
    "layers.0.mixer.norm.weight": (300,),
}


def drawn_at_once(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A matrix as one draw and one product make it."""
    generator = torch.Generator().manual_seed(dummy._mix(seed, name))
    return torch.randn(shape, generator=generator).mul_(shape[-1] ** -0.5)


@pytest.mark.parametrize("cores", [1, 2, 5])
@pytest.mark.parametrize("piece", [1, 256, 2**20])
def test_values_do_not_depend_on_pieces_and_threads(
    cores: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = dummy_weights(WIDE, torch.float32, "cpu", seed=3)
    monkeypatch.setattr(dummy, "_PIECE", piece)
    monkeypatch.setattr(dummy, "_cores", lambda: cores)
    assert_same(dummy_weights(WIDE, torch.float32, "cpu", seed=3), expected)
    for name, shape in WIDE.items():
        if len(shape) > 1:
            assert torch.equal(expected[name], drawn_at_once(name, shape, 3)), name
    targets = {name: torch.full(shape, torch.nan).half() for name, shape in WIDE.items()}
    targets["embed_tokens.weight"] = torch.full((24, 97), torch.nan).half().t()  # in other strides
    drawn = dummy_weights(WIDE, torch.bfloat16, "cpu", seed=3, targets=targets)
    assert all(drawn[name] is target for name, target in targets.items())
    assert_same(targets, {name: value.half() for name, value in expected.items()})


@pytest.mark.parametrize("piece", [1, 16, 250, 256, 2**20])
@pytest.mark.parametrize("width", [1, 3, 5, 16, 1000])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 31, 256, 257, 1000, 1023])
def test_pieces_cover_a_tensor_once(
    rows: int, width: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dummy, "_PIECE", piece)
    pieces = list(dummy._pieces(rows, width))
    assert [row for part in pieces for row in part] == list(range(rows))
    sizes = [len(part) * width for part in pieces]
    assert all(size % 16 == 0 for size in sizes[:-1])
    assert len(sizes) == 1 or sizes[-1] >= 16
    assert max(sizes) <= piece + 16 * width + 16, "a piece bounds the memory"


def test_large_tensors_are_begun_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dummy, "_cores", lambda: 1)
    begun: list[tuple[int, ...]] = []
    fill = dummy._fill
    monkeypatch.setattr(dummy, "_fill", lambda *a: (begun.append(a[2]), fill(*a)))
    drawn = dummy_weights(WIDE, torch.float32, "cpu", seed=0)
    assert begun[:2] == [(1031, 4), (97, 24)] and len(begun) == len(WIDE)
    assert list(drawn) == list(WIDE)


def test_an_error_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dummy, "_cores", lambda: 2)
    targets = {"layers.0.mlp.up_proj.weight": torch.empty(40, 25)}
    with pytest.raises(RuntimeError, match=r"must match|broadcast"):
        dummy_weights(WIDE, torch.float32, "cpu", seed=0, targets=targets)


def test_a_caller_in_inference_mode() -> None:
    """Its tensors cannot be changed outside of it, in other threads neither."""
    with torch.inference_mode():
        drawn = dummy_weights(WIDE, torch.float32, "cpu", seed=3)
    assert all(value.is_inference() for value in drawn.values())
    plain = dummy_weights(WIDE, torch.float32, "cpu", seed=3)
    assert not any(value.is_inference() for value in plain.values())
    assert_same({name: value.clone() for name, value in drawn.items()}, plain)


def test_no_weights_at_all() -> None:
    assert dummy_weights({}, torch.float32, "cpu", seed=0) == {}
