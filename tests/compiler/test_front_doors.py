"""`minivllm.compile` on modules of others: what is fused, the numbers, the weights, the limits."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import TWO_GPUS
from torch import Tensor, nn
from user_modules import (
    FAMILIES,
    Apply,
    Projections,
    SwiGLU,
    Vectors,
    causal_lm,
    llama,
    qwen3,
    relative_error,
    sites,
    token_ids,
)

import minivllm
from minivllm.compiler.front_door import CompiledModule
from minivllm.errors import UserError

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "compile_your_own.md"
IDS = token_ids(2, 8)
EXAMPLE = {"input_ids": IDS, "use_cache": False}


def found(compiled: CompiledModule) -> dict[str, int]:
    return {r.name: r.matches for r in compiled.reports if r.name != "canonicalize"}


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS, **kwargs: Any) -> Tensor:
    return model(input_ids=ids, use_cache=False, **kwargs).logits


def agrees(compiled: CompiledModule, model: nn.Module, **kwargs: Any) -> bool:
    return relative_error(logits(compiled, **kwargs), logits(model, **kwargs)) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_models_are_fused_and_equal(family: str) -> None:
    model = causal_lm(family)
    reference = copy.deepcopy(model)
    compiled = minivllm.compile(model, EXAMPLE)
    assert found(compiled) == sites(family, layers=2)
    for shape in [(2, 8), (3, 5), (2, 90), (1, 7), (1, 1), (4, 1), (1, 30)]:
        ids = token_ids(*shape)
        assert relative_error(logits(compiled, ids), logits(reference, ids)) < 1e-5
    # sizes of 2 and more share a trace; each place of a 1 has its own
    assert len(compiled.traces) == 4
    assert all(t.reports[1].matches == sites(family, 2)["fuse_norms"] for t in compiled.traces)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_models_round_no_more_than_before(family: str) -> None:
    model = causal_lm(family).to(torch.bfloat16)
    exact = logits(copy.deepcopy(model).float())
    plain = relative_error(logits(model), exact)
    compiled = minivllm.compile(model, EXAMPLE)
    assert found(compiled) == sites(family, layers=2)
    output = logits(compiled)
    assert output.dtype == torch.bfloat16
    assert 0 < relative_error(output, exact) <= 1.1 * plain


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu_the_kernels_are_triton(family: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64}
    model = causal_lm(family, layers=4, **sizes).to("cuda", torch.bfloat16)
    exact_model = copy.deepcopy(model).float()
    ids = token_ids(2, 40).cuda()
    plain = {n: logits(model, ids[:, :n]) for n in (40, 9)}
    compiled = minivllm.compile(model, {"input_ids": ids, "use_cache": False})
    assert found(compiled) == sites(family, layers=4)
    chosen = compiled.traces[0].program.executable(list(compiled._weights())).implementations
    assert chosen == dict.fromkeys(("rms_norm", "add_rms_norm", "silu_mul"), "triton")
    for n, before in plain.items():
        exact = logits(exact_model, ids[:, :n])
        allowed = 1.1 * relative_error(before, exact)
        assert 0 < relative_error(logits(compiled, ids[:, :n]), exact) <= allowed
    assert len(compiled.traces) == 1


@TWO_GPUS[0]
@TWO_GPUS[1]
def test_on_a_gpu_that_is_not_the_current_one() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64}
    model = causal_lm("llama", layers=2, **sizes).to(torch.bfloat16)
    outputs = []
    for device in ("cuda:0", "cuda:1"):
        ids = token_ids(2, 40).to(device)
        example = {"input_ids": ids, "use_cache": False}
        compiled = minivllm.compile(copy.deepcopy(model).to(device), example)
        assert torch.cuda.current_device() == 0
        outputs.append(logits(compiled, ids).cpu())
    assert outputs[0].isfinite().all() and torch.equal(*outputs)


def test_calls_have_the_modules_signature() -> None:
    model = llama(1)
    compiled = minivllm.compile(model)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    assert agrees(compiled, model, attention_mask=mask)
    assert len(compiled.traces) == 1
    logits(compiled, attention_mask=mask[:, :5], ids=IDS[:, :5])
    assert len(compiled.traces) == 1
    with torch.no_grad():
        whole = model(IDS, output_hidden_states=True, use_cache=False)
        outputs = compiled(IDS, use_cache=False, output_hidden_states=True)
        assert type(outputs) is type(whole) and len(outputs.hidden_states) == 2
        for ours, theirs in zip(outputs.hidden_states, whole.hidden_states, strict=True):
            assert relative_error(ours, theirs) < 1e-5
        (first,) = compiled(IDS, use_cache=False, return_dict=False)
    assert relative_error(first, whole.logits) < 1e-5


def test_dynamic_false_traces_each_size() -> None:
    compiled = minivllm.compile(llama(1), dynamic=False)
    for shape in ((2, 8), (2, 9), (2, 8)):
        logits(compiled, token_ids(*shape))
    assert len(compiled.traces) == 2
    assert "input_ids [2, 9]" in compiled.report


def test_merged_parameters_are_views_and_nothing_is_held_twice() -> None:
    model = qwen3().to(torch.bfloat16)
    names = list(model.state_dict())
    compiled = minivllm.compile(model, EXAMPLE)
    mlp = model.model.layers[0].mlp
    gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
    assert isinstance(gate, nn.Parameter) and gate.requires_grad and gate.is_contiguous()
    assert gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
    assert up.data_ptr() - gate.data_ptr() == 48 * 32 * 2  # 44 rows, padded to 16 bytes of output
    assert list(model.state_dict()) == names
    held = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    padding = 2 * 2 * 4 * 32 * 2  # layers, parts, rows, columns, bytes
    assert sum(s.nbytes() for s in held.values()) == padding + 2 * sum(
        p.numel() for p in model.parameters()
    )
    bound = compiled.traces[0].program.executable(compiled._weights()).module.state_dict()
    assert {t.untyped_storage().data_ptr() for t in bound.values() if t.ndim > 1} <= held.keys()
    assert "10 parameters are views of 4 merged ones" in compiled.report
    # another trace takes the same merged weights
    pointer = gate.data_ptr()
    logits(compiled, token_ids(1, 3))
    assert len(compiled.traces) == 2 and gate.data_ptr() == pointer


def test_without_merging_parameters_stay_where_they_are() -> None:
    model = qwen3()
    before = [p.data_ptr() for p in model.parameters()]
    compiled = minivllm.compile(model, EXAMPLE, disable=["merge_linears"])
    assert agrees(compiled, model)
    assert "merge_linears" not in found(compiled)
    assert [p.data_ptr() for p in model.parameters()] == before


def test_weights_may_change_in_every_way() -> None:
    model = qwen3(1)
    compiled = minivllm.compile(model, EXAMPLE)
    gate = model.model.layers[0].mlp.gate_proj
    before = logits(compiled)
    with torch.no_grad():
        gate.weight.mul_(3)
    assert agrees(compiled, model) and relative_error(logits(compiled), before) > 1e-3
    gate.weight.data = torch.randn_like(gate.weight)
    assert agrees(compiled, model)
    gate.weight = nn.Parameter(torch.randn_like(gate.weight))
    assert agrees(compiled, model)
    model.load_state_dict({n: 1.1 * w for n, w in copy.deepcopy(model.state_dict()).items()})
    assert agrees(compiled, model)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    assert agrees(compiled, model)
    assert len(compiled.traces) == 1, "the same graph, bound again"
    attention = model.model.layers[0].self_attn
    attention.k_proj.weight.data = attention.k_proj.weight.data.t()  # the same memory
    assert attention.k_proj.weight.shape == (32, 32) and agrees(compiled, model)
    mlp = model.model.layers[0].mlp
    for linear in (mlp.gate_proj, mlp.up_proj):
        linear.weight.data = linear.weight.data[:40]
    mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, :40]
    assert agrees(compiled, model)
    model.lm_head = nn.Linear(32, 97, bias=True).eval()
    assert agrees(compiled, model)


def test_dtype_and_device_moves() -> None:
    with torch.device("meta"):
        model = llama(1)
    compiled = minivllm.compile(model, {"input_ids": IDS.to("meta"), "use_cache": False})
    assert found(compiled) == sites("llama", layers=1)
    assert logits(compiled, IDS.to("meta")).device.type == "meta"
    real = llama(1)
    model.to_empty(device="cpu").load_state_dict(real.state_dict())
    model.model.rotary_emb = real.model.rotary_emb
    assert agrees(compiled, real)
    program = compiled.traces[-1].program
    state = program.executable(compiled._weights()).module.state_dict()
    held = [weakref.ref(w.untyped_storage()) for n, w in state.items() if "up_proj" in n]
    del state
    assert [ref() is not None for ref in held] == [True]
    model.to(torch.bfloat16)
    assert torch.equal(logits(compiled), logits(model))
    assert logits(compiled).dtype == torch.bfloat16
    gc.collect()  # of the bound module, which is part of a cycle
    assert [ref() for ref in held] == [None], "the trace in float32 holds no weights any more"


def test_tied_weights_stay_tied_and_may_be_untied() -> None:
    model = qwen3(1, tie_word_embeddings=True)
    compiled = minivllm.compile(model, EXAMPLE)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    assert agrees(compiled, model)
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
    assert agrees(compiled, model)


def test_overlapping_parameters_are_not_merged() -> None:
    model = Projections()
    model.a.weight = nn.Parameter(model.b.weight.data[:6])
    compiled = minivllm.compile(model.eval(), torch.randn(3, 8))
    assert found(compiled)["merge_linears"] == 0
    with torch.no_grad():
        model.b.weight.mul_(2)
    x = torch.randn(3, 8)
    assert relative_error(compiled(x)[0], model(x)[0]) < 1e-6


def test_torch_norms_own_weights_and_switched_modes() -> None:
    model = SwiGLU().eval()
    compiled = minivllm.compile(model)
    for shape in ((3, 8), (2, 3, 8), (2, 3, 4, 8)):
        x = torch.randn(shape)
        assert relative_error(compiled(x), model(x)) < 1e-5
        assert [found(compiled)[n] for n in ("fuse_norms", "merge_linears")] == [1, 1]
        assert found(compiled)["fuse_silu_mul"] == 1
    assert model.gate.untyped_storage().data_ptr() == model.up.untyped_storage().data_ptr()


def test_a_view_of_a_merged_part_that_does_not_fit_copies() -> None:
    model = Projections().eval()
    compiled = minivllm.compile(model, torch.randn(3, 8))
    assert found(compiled) | {"merge_linears": 1, "fit_views": 1} == found(compiled)
    x = torch.randn(5, 8)
    (a, others), (a2, others2) = compiled(x), model(x)
    assert relative_error(a, a2) < 1e-6 and relative_error(others["flat"], others2["flat"]) < 1e-6


def test_rows_that_do_not_lie_in_one_piece_are_copied() -> None:
    norm = nn.RMSNorm(6, eps=1e-6).eval()
    model = Apply(lambda x: norm(x.t()))
    model.norm = norm
    compiled = minivllm.compile(model.eval(), torch.randn(6, 4))
    graph = compiled.graph
    (node,) = graph.nodes(torch.ops.minivllm.rms_norm.default)
    assert node.args[0].target is torch.ops.aten.contiguous.default
    x = torch.randn(6, 9)
    assert relative_error(compiled(x), model(x)) < 1e-6


def test_arguments_whose_rows_are_in_pieces_have_traces_of_their_own() -> None:
    norm = nn.RMSNorm(6, eps=1e-6).eval()
    compiled = minivllm.compile(norm, torch.randn(4, 6))
    wide = torch.randn(8, 12)
    for x in (torch.randn(6, 9).t(), wide[:, ::2], wide[:, :6], wide[:3, :6]):
        assert relative_error(compiled(x), norm(x)) < 1e-6
    copied = [
        bool(t.program.graph.nodes(torch.ops.aten.contiguous.default)) for t in compiled.traces
    ]
    assert copied == [False, True, True], "kernels read rows in one piece"


@pytest.mark.parametrize("shape", [(4, 12), (8, 6)])
def test_rows_are_taken_from_a_view_only_if_they_are_the_same(shape: tuple[int, ...]) -> None:
    norm = nn.RMSNorm(6, eps=1e-6).eval()
    model = Apply(lambda x, y: norm(x.view_as(y)))
    model.norm = norm
    x, y = torch.randn(shape), torch.randn(2, 4, 6)
    compiled = minivllm.compile(model.eval(), (x, y))
    assert relative_error(compiled(x, y), model(x, y)) < 1e-6


def test_linears_without_columns_to_split_are_not_merged() -> None:
    model = Vectors().eval()
    compiled = minivllm.compile(model, torch.randn(3, 8))
    assert found(compiled)["merge_linears"] == 0
    reasons = {m.reason.partition(":")[0] for r in compiled.reports for m in r.misses}
    assert "another shape" in reasons
    x = torch.randn(2, 3, 8)
    assert relative_error(compiled(x), model(x)) < 1e-6
    assert model.one.shape == (1,)


def test_a_square_of_truth_values_is_no_power() -> None:
    model = Apply(lambda x: (x * x, (x + 2) * (x + 2))).eval()
    compiled = minivllm.compile(model)
    x = torch.tensor([True, False])
    assert [y.tolist() for y in compiled(x)] == [[True, False], [9, 4]]


def test_type_as_that_moves_stays() -> None:
    model = Apply(lambda x: torch.arange(x.shape[0], device="cpu").type_as(x) * x).eval()
    compiled = minivllm.compile(model, torch.ones(3, device="meta"))
    assert len(compiled.graph.nodes(torch.ops.aten.type_as.default)) == 1
    here = minivllm.compile(model, torch.ones(3))
    assert not here.graph.nodes(torch.ops.aten.type_as.default)
    assert here(torch.full((4,), 2.0)).tolist() == [0, 2, 4, 6]


def test_without_patterns_a_module_works_as_before() -> None:
    model = nn.Sequential(nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5), nn.GELU(), nn.Flatten()).eval()
    compiled = minivllm.compile(model, torch.randn(2, 3, 10))
    assert set(found(compiled).values()) == {0}
    x = torch.randn(4, 3, 12)
    assert relative_error(compiled(x), model(x)) < 1e-6


def test_outputs_are_as_apart_as_before_and_random_numbers_are_not_shared() -> None:
    model = Apply(lambda x: (x + 1, x + 1, None, torch.rand_like(x), torch.rand_like(x))).eval()
    compiled = minivllm.compile(model, torch.zeros(3))
    torch.manual_seed(1)
    expected = model(torch.zeros(5))
    torch.manual_seed(1)
    a, b, none, r1, r2 = compiled(torch.zeros(5))
    assert none is None and torch.equal(a, expected[0]) and torch.equal(r1, expected[3])
    assert torch.equal(r2, expected[4]) and not torch.equal(r1, r2)
    a.zero_()
    assert torch.equal(b, expected[1])


def test_calls_that_return_nothing_are_all_made() -> None:
    seen = []

    @torch.library.custom_op("minivllm_tests::watch", mutates_args=())
    def watch(x: Tensor) -> None:
        seen.append(float(x.sum()))

    watch.register_fake(lambda x: None)

    def watched(x: Tensor) -> Tensor:
        torch.ops.minivllm_tests.watch(x)
        torch.ops.minivllm_tests.watch(x)
        return x * 2

    compiled = minivllm.compile(Apply(watched).eval(), torch.ones(3))
    assert torch.equal(compiled(torch.ones(4)), torch.full((4,), 2.0))
    assert seen == [4.0, 4.0]


def test_a_twisted_norm_is_a_near_miss_of_the_report_and_explained() -> None:
    def twisted(x: Tensor, w: Tensor) -> Tensor:
        x = x.float()
        return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6))

    said: list[str] = []
    x = torch.randn(3, 8), torch.randn(8)
    compiled = minivllm.compile(Apply(twisted).eval(), x, explain="fuse_norms", say=said.append)
    assert found(compiled)["fuse_norms"] == 0
    assert "| fuse_norms | 0 | 1 |" in compiled.report
    assert "aten.sqrt in place of aten.mean" in said[0]


def test_an_explanation_tells_layers_that_are_alike_together() -> None:
    said: list[str] = []
    minivllm.compile(qwen3(3), EXAMPLE, explain="fuse_norms", say=said.append)
    (text,) = said
    first, *lines = text.splitlines()
    assert first == "fuse_norms on the module graph: 13 sites matched"
    norms = ("input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm")
    alike = [f"  model.layers.*.{norm}: 3, in layers 0-2" for norm in norms]
    assert sorted(lines) == sorted([*alike, "  model.norm: 1", "  no near miss"])


def test_dumps_are_the_same_bytes_twice(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        minivllm.compile(qwen3(1), EXAMPLE, dump_dir=folder)
    names = sorted(p.name for p in (folders[0] / "graph_0").iterdir())
    assert len(names) == 9 + 8 + 1 and "05_fuse_silu_mul.diff" in names
    for name in names:
        texts = [(folder / "graph_0" / name).read_text() for folder in folders]
        assert texts[0] == texts[1]
    last = (folders[0] / "graph_0" / "08_fit_views.txt").read_text()
    assert last.count("minivllm.add_rms_norm") == 2 and last.count("minivllm.silu_mul") == 1
    assert "input  input_ids: int64[input_ids.0, input_ids.1]    # an argument\n" in last
    assert re.search(r"\n\nreturn %\w+: float32\[input_ids.0, input_ids.1, 97\]\n$", last)
    assert "model.layers.0.self_attn.q_proj+k_proj+v_proj.weight" in last


def in_place(x: Tensor) -> Tensor:
    y = x + 1
    y.mul_(2)
    return y


def strided(x: Tensor) -> Tensor:
    return x.as_strided((2,), (2,))


def by_value(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("module", "example", "options", "message"),
    [
        (len, None, {}, "takes an nn.Module, not builtin_function"),
        (Apply(in_place).eval(), torch.ones(3), {}, r"in place: aten.mul_.Tensor at .*\.py:\d+"),
        (Apply(by_value).eval(), torch.ones(3), {}, "cannot be traced by torch.export"),
        (Apply(strided).eval(), torch.ones(4), {}, r"calls as_strided at .*\.py:\d+"),
        (Apply(in_place).train(), torch.ones(3), {}, "training mode; .*call eval"),
        (Apply(in_place).eval(), object(), {}, "example_inputs is a object; give a tuple"),
        (Apply(in_place).eval(), {"x": object()}, {}, "an argument of Apply is a object"),
        (SwiGLU().eval(), None, {"disable": ["fuse_norm"]}, "no pass 'fuse_norm' for modules"),
        (SwiGLU().eval(), None, {"disable": "fuse_norms"}, r"is a text; give a list"),
        (SwiGLU().eval(), None, {"disable": ["canonicalize"]}, "is mandatory"),
        (SwiGLU().eval(), None, {"explain": "lower_mixers"}, "no pass 'lower_mixers'"),
        (SwiGLU().eval(), None, {"implementations": {"norm": "x"}}, "no op 'norm'"),
        (
            SwiGLU().eval(),
            torch.ones(2, 8),
            {"implementations": {"rms_norm": "triton"}},
            "rms_norm='triton' .*runs on cuda only",
        ),
        (SwiGLU().eval(), torch.ones(2, 8), {"dump_dir": "/dev/null/x"}, "dump_dir=.*cannot write"),
    ],
)
def test_what_cannot_be_done_is_said(
    module: Any, example: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        minivllm.compile(module, example, **options)


def test_calls_that_cannot_be_served() -> None:
    model = llama(1)
    compiled = minivllm.compile(model)
    assert "nothing is traced yet" in compiled.report
    with pytest.raises(UserError, match="use_cache=False"):
        compiled(input_ids=IDS, use_cache=True)
    x = torch.ones(2, 8, requires_grad=True)
    swiglu = minivllm.compile(SwiGLU().eval())
    with pytest.raises(UserError, match=r"requires gradients.*torch.no_grad"):
        swiglu(x)
    with torch.no_grad():
        assert not swiglu(x).requires_grad
    with torch.autocast("cpu"), pytest.raises(UserError, match="autocast is on for cpu"):
        swiglu(x.detach())
    model.train()
    with pytest.raises(UserError, match="training mode"):
        compiled(input_ids=IDS, use_cache=False)
    model.eval()
    assert not compiled(input_ids=IDS, use_cache=False).logits.requires_grad
    model.model.layers[0].mlp.train()
    with pytest.raises(UserError, match="a part of LlamaForCausalLM is in training mode"):
        compiled(input_ids=IDS, use_cache=False)
    model.eval()
    # the module itself still trains
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0


def test_inference_mode_leaves_parameters_as_they_were() -> None:
    model = llama(1)
    compiled = minivllm.compile(model)
    with torch.inference_mode():
        compiled(input_ids=IDS, use_cache=False)
    assert not any(p.is_inference() for p in model.parameters())
    assert agrees(compiled, model)


def test_many_traces_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    compiled = minivllm.compile(Apply(lambda x, n: x * n).eval())
    for n in range(9):
        assert torch.equal(compiled(torch.ones(2), n=n), torch.full((2,), float(n)))
    assert len(compiled.traces) == 9
    assert "Apply has been traced 9 times" in caplog.text


def test_the_document_runs_and_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    (code,) = re.findall(r"<!-- executed by .* -->\n```python\n(.*?)```", text, re.DOTALL)
    exec(code, {})
    printed = capsys.readouterr().out
    rows = re.findall(r"^\| (\w+_\w+) \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    assert len(rows) == 7
    for name, matches, near in rows:
        assert f"| {name} | {matches} | {near} |" in printed
