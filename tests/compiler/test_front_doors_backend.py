"""`torch.compile(model, backend="minivllm")`: the same fusions on the graphs that dynamo finds."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from user_modules import (
    FAMILIES,
    Apply,
    Projections,
    SwiGLU,
    causal_lm,
    qwen3,
    relative_error,
    sites,
    token_ids,
)

from minivllm.compiler.backend import minivllm
from minivllm.compiler.module_program import ModuleProgram

ROOT = Path(__file__).resolve().parents[2]
IDS = token_ids(2, 8)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    minivllm.reports.clear()
    yield
    torch._dynamo.reset()


def found() -> list[dict[str, int]]:
    """What the passes found in each graph since the test began."""
    return [{r.name: r.matches for r in g if r.name != "canonicalize"} for g in minivllm.reports]


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_models_are_fused_and_equal(family: str, dynamic: bool | None) -> None:
    model = causal_lm(family)
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend=minivllm, dynamic=dynamic, fullgraph=True)
    for shape in ((2, 8), (3, 5), (2, 60)):
        ids = token_ids(*shape)
        assert relative_error(logits(compiled, ids), logits(reference, ids)) < 1e-5
    graphs = 1 if dynamic else 2  # the first graph is for its own sizes alone
    assert found() == [sites(family, layers=2)] * graphs


def test_bfloat16_models_round_no_more_than_before() -> None:
    model = qwen3().to(torch.bfloat16)
    exact = logits(copy.deepcopy(model).float())
    plain = relative_error(logits(model), exact)
    output = logits(torch.compile(model, backend=minivllm))
    assert found() == [sites("qwen3", layers=2)]
    assert 0 < relative_error(output, exact) <= 1.1 * plain


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu() -> None:
    model = qwen3(4, hidden_size=256, intermediate_size=768, head_dim=64)
    model.to("cuda", torch.bfloat16)
    exact_model = copy.deepcopy(model).float()
    shapes = [token_ids(2, n).cuda() for n in (40, 9, 70)]
    plain = [logits(model, ids) for ids in shapes]
    compiled = torch.compile(model, backend=minivllm, dynamic=True)
    for ids, before in zip(shapes, plain, strict=True):
        exact = logits(exact_model, ids)
        allowed = 1.1 * relative_error(before, exact)
        assert 0 < relative_error(logits(compiled, ids), exact) <= allowed
    assert found() == [sites("qwen3", layers=4)]


def test_generation_of_transformers() -> None:
    model = qwen3(1)
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = copy.deepcopy(model).generate(IDS, **settings)
    model.forward = torch.compile(model.forward, backend=minivllm)
    assert torch.equal(model.generate(IDS, **settings), expected)
    assert all(graph == sites("qwen3", layers=1) for graph in found())
    assert 2 <= len(found()) <= 4, "a prompt, a token, a token with a cache of any length"


def test_merged_weights_are_shared_by_graphs_and_follow_their_parameters() -> None:
    model = qwen3()
    compiled = torch.compile(model, backend=minivllm, dynamic=False)
    reference = copy.deepcopy(model)
    gate, up = (getattr(model.model.layers[0].mlp, n).weight for n in ("gate_proj", "up_proj"))
    logits(compiled)
    pointer = gate.data_ptr()
    assert gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
    logits(compiled, token_ids(2, 9))
    assert len(found()) == 2 and gate.data_ptr() == pointer
    with torch.no_grad():
        gate.mul_(2)
        reference.model.layers[0].mlp.gate_proj.weight.mul_(2)
    assert relative_error(logits(compiled), logits(reference)) < 1e-5
    gate.data = torch.randn_like(gate)
    reference.model.layers[0].mlp.gate_proj.weight.data = gate.data.clone()
    for ids in (IDS, token_ids(2, 9)):
        assert relative_error(logits(compiled, ids), logits(reference, ids)) < 1e-5
    assert len(found()) == 2


def test_layers_that_share_a_graph_are_bound_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [SwiGLU().eval() for _ in range(3)]
    bound = []
    bind = ModuleProgram._bind
    monkeypatch.setattr(
        ModuleProgram, "_bind", lambda self, tensors: bound.append(1) or bind(self, tensors)
    )
    graphs = minivllm.count
    compiled = [torch.compile(layer, backend="minivllm") for layer in layers]
    with torch.no_grad():
        for x in torch.randn(3, 4, 8):
            for layer, again in zip(layers, compiled, strict=True):
                assert relative_error(again(x), layer(x)) < 1e-5
        assert (minivllm.count - graphs, len(bound)) == (1, 3)
        layers[1].gate.data = torch.randn_like(layers[1].gate)
        assert relative_error(compiled[1](x), layers[1](x)) < 1e-5
    assert len(bound) == 4


def test_options() -> None:
    model = SwiGLU().eval()
    before = model.gate.data_ptr()
    options = {"disable": ["merge_linears"], "implementations": {"rms_norm": "torch"}}
    x = torch.randn(3, 8)
    with torch.no_grad():
        expected = model(x)
        compiled = torch.compile(model, backend=minivllm, options=options)
        assert relative_error(compiled(x), expected) < 1e-6
    assert "merge_linears" not in found()[0] and found()[0]["fuse_norms"] == 1
    assert model.gate.data_ptr() == before
    assert "| fuse_silu_mul | 1 | 0 |" in minivllm.report


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": {"dsable": []}}, "no option 'dsable'; choose from disable, implementations"),
        ({"options": {"disable": ["norms"]}}, "no pass 'norms' for modules"),
        ({"mode": "max-autotune"}, "takes options=, no mode="),
    ],
)
def test_wrong_options_are_told(arguments: dict[str, Any], message: str) -> None:
    compiled = torch.compile(SwiGLU().eval(), backend=minivllm, **arguments)
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match=message):
        compiled(torch.ones(2, 8))


def test_where_gradients_are_wanted_the_graph_stays(caplog: pytest.LogCaptureFixture) -> None:
    model = SwiGLU().eval()
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend=minivllm)
    x = torch.randn(3, 8)
    compiled(x).sum().backward()
    reference(x).sum().backward()
    assert relative_error(model.gate.grad, reference.gate.grad) < 1e-6
    assert "leaves a graph as it is: gradients are wanted" in caplog.text and found() == []
    with torch.no_grad():
        assert relative_error(compiled(x), reference(x)) < 1e-6
    assert [graph["fuse_norms"] for graph in found()] == [1]


def test_under_autocast_the_graph_stays(caplog: pytest.LogCaptureFixture) -> None:
    model = Projections().eval()
    x = torch.randn(3, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(x)[0]
        output = torch.compile(model, backend=minivllm)(x)[0]
    assert output.dtype == torch.bfloat16 and torch.equal(output, expected)
    assert "autocast is on" in caplog.text


def test_writes_in_place_leave_the_graph_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def in_place(x: Tensor) -> Tensor:
        y = x + 1
        y.mul_(2)
        return y

    x = torch.ones(3)
    with torch.no_grad():
        assert torch.equal(torch.compile(in_place, backend=minivllm)(x), torch.full((3,), 4.0))
    assert re.search(r"in place: aten.mul_.Tensor at compiler/test_front_doors_b", caplog.text)
    assert torch.equal(x, torch.ones(3))


def test_graph_breaks_and_branches_work() -> None:
    model = SwiGLU().eval()

    def by_value(x: Tensor) -> Tensor:
        return model(x) if x.sum() > 0 else -model(-x)

    compiled = torch.compile(by_value, backend=minivllm)
    with torch.no_grad():
        for sign in (1, -1):
            x = sign * torch.rand(3, 8)
            assert relative_error(compiled(x), by_value(x)) < 1e-6
    assert [g["fuse_norms"] for g in found() if g["fuse_norms"]] == [1, 1]


def test_dropout_in_training_mode_draws_the_same_numbers() -> None:
    model = Apply(nn.Dropout(0.5)).train()
    compiled = torch.compile(model, backend=minivllm)
    x = torch.ones(64)
    with torch.no_grad():
        torch.manual_seed(3)
        expected = model(x)
        torch.manual_seed(3)
        assert torch.equal(compiled(x), expected)
    assert 0 < int((expected == 0).sum()) < 64


def test_the_name_is_registered_by_the_package(tmp_path: Path) -> None:
    """As an installed package tells it: pyproject's entry point, in metadata on the path."""
    text = (ROOT / "pyproject.toml").read_text()
    entry = re.search(r"\[project.entry-points.torch_dynamo_backends\]\n(\w+ = )\"(.+)\"\n", text)
    assert entry is not None
    metadata = tmp_path / "declared-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: declared\nVersion: 1\n")
    points = f"[torch_dynamo_backends]\n{entry[1]}{entry[2]}\n"
    (metadata / "entry_points.txt").write_text(points)
    code = (
        "import sys, torch; from torch import nn\n"
        "assert 'minivllm' in torch._dynamo.list_backends()\n"
        "model = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4, eps=1e-6)).eval()\n"
        "assert 'minivllm.compiler' not in sys.modules\n"
        "x = torch.randn(3, 4)\n"
        "with torch.no_grad():\n"
        "    error = (torch.compile(model, backend='minivllm')(x) - model(x)).abs().max()\n"
        "backend = sys.modules['minivllm.compiler.backend'].minivllm\n"
        "print(float(error) < 1e-6, backend.reports[0][1].matches)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, "True 1"), done.stderr
