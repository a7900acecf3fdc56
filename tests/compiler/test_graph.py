"""The graph: leaves of the vocabulary, and calls that are typed the moment they are made."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from toy_graphs import Builder, aten, code, targets, toy

from minivllm.compiler.graph import INPUTS, SYMBOLS, Graph, StateSpec
from minivllm.ops import OPS


def test_a_clone_is_a_copy_of_its_own(source: Graph) -> None:
    before = code(source)
    clone = source.clone("prefill")
    assert code(clone) == before
    assert not set(clone.fx.nodes) & set(source.fx.nodes)
    clone.input("seq_lens")
    clone.state("layers.0.conv", StateSpec("slot", (80, 4), torch.float32))
    node = clone.output
    clone.replace(node, clone.call(aten.clone.default, node, like=node))
    clone.weights.clear()
    assert code(source) == before
    assert source.states == {} and "norm.weight" in source.weights
    assert source.input_names == ("input_ids", "positions")


def test_in_decode_every_sequence_has_one_token(source: Graph) -> None:
    prefill, decode = source.clone("prefill"), source.clone("decode")
    assert prefill.symbols["seqs"] is not prefill.symbols["tokens"]
    assert decode.symbols["seqs"] is decode.symbols["tokens"]
    dims = [tuple(g.named(s) for s in g.input("block_table").meta["val"].shape)
            for g in (prefill, decode)]  # fmt: skip
    assert dims == [("seqs", "blocks"), ("tokens", "blocks")]


@pytest.mark.parametrize("name", INPUTS)
def test_an_input_has_the_type_of_the_vocabulary(source: Graph, name: str) -> None:
    graph = source.clone("prefill")
    node = graph.input(name)
    value, spec = node.meta["val"], INPUTS[name]
    assert value.dtype == spec.dtype
    assert tuple(graph.named(s) for s in value.shape) == tuple(map(str, spec.dims))
    assert graph.input(name) is node
    assert graph.input_names.count(name) == 1
    kinds = [n.op for n in graph.fx.nodes]
    assert "placeholder" not in kinds[kinds.index("get_attr") :]
    graph.fx.lint()


def test_an_input_outside_the_vocabulary(source: Graph) -> None:
    with pytest.raises(KeyError, match="attention_mask"):
        source.clone("prefill").input("attention_mask")


def test_all_dims_of_the_vocabulary_are_symbols() -> None:
    dims = {d for spec in INPUTS.values() for d in spec.dims if isinstance(d, str)}
    assert dims - {"seqs + 1"} < set(SYMBOLS)


def test_state(source: Graph) -> None:
    graph = source.clone("prefill")
    slots = StateSpec("slot", (4, 12, 8), torch.float32)
    blocks = StateSpec("block", (16, 2, 16), torch.bfloat16)
    node = graph.state("layers.0.recurrent", slots)
    assert node.target == "state.layers.0.recurrent"
    assert [graph.named(s) for s in node.meta["val"].shape] == ["slots", "4", "12", "8"]
    cache = graph.state("layers.1.k_cache", blocks)
    assert [graph.named(s) for s in cache.meta["val"].shape] == ["num_blocks", "16", "2", "16"]
    assert cache.meta["val"].dtype == torch.bfloat16
    assert graph.states == {"state.layers.0.recurrent": slots, "state.layers.1.k_cache": blocks}
    assert graph.state("layers.0.recurrent", slots) is node
    with pytest.raises(AssertionError, match=r"state.layers.0.recurrent was declared as"):
        graph.state("layers.0.recurrent", blocks)
    graph.fx.lint()


def test_state_of_the_published_model() -> None:
    """The 0.8B: 1,097,728 bytes a layer and slot, 12,288 bytes a token in six layers."""
    conv = StateSpec("slot", (6144, 4), torch.bfloat16)
    recurrent = StateSpec("slot", (16, 128, 128), torch.float32)
    cache = StateSpec("block", (64, 2, 256), torch.bfloat16)
    assert conv.bytes_per_entry + recurrent.bytes_per_entry == 1_097_728
    assert 6 * 2 * cache.bytes_per_entry == 64 * 12_288


def test_a_call_is_typed_at_once(source: Graph) -> None:
    graph = source.clone("prefill")
    like = graph.nodes(aten.softplus.default)[0]
    new = graph.call(aten.to.dtype, like.args[0], torch.bfloat16, like=like)
    assert new.next is like
    assert new.meta["val"].dtype == torch.bfloat16
    assert [graph.named(s) for s in new.meta["val"].shape] == ["tokens", "4"]
    assert (new.meta["module"], new.meta["source"]) == (like.meta["module"], like.meta["source"])
    total = graph.call(aten.sum.dim_IntList, like, [-1], keepdim=True, like=graph.output)
    assert [graph.named(s) for s in total.meta["val"].shape] == ["tokens", "1"]
    both = graph.call(aten.chunk.default, new, 2, -1, like=like)
    assert [tuple(v.shape)[1] for v in both.meta["val"]] == [2, 2]


def test_a_call_that_cannot_be_typed_fails(source: Graph) -> None:
    graph = source.clone("prefill")
    head = graph.output
    with pytest.raises(RuntimeError):
        graph.call(aten.linear.default, head, head.args[1], like=head)
    with pytest.raises(Exception, match="argument"):
        graph.call(OPS["attention"].overload, head, like=head)


def test_replace_moves_every_user(source: Graph) -> None:
    def body(b: Builder) -> Any:
        x = b.hidden()
        y = b.call(aten.relu.default, x)
        return b.call(aten.add.Tensor, y, b.call(aten.mul.Tensor, y, y))

    graph = toy(source, body)
    (relu,) = graph.nodes(aten.relu.default)
    graph.replace(relu, graph.call(aten.silu.default, relu.args[0], like=relu))
    assert targets(graph) == ["aten.embedding", "aten.silu", "aten.mul.Tensor", "aten.add.Tensor"]
    (silu,) = graph.nodes(aten.silu.default)
    assert len(silu.users) == 2
    graph.fx.lint()


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.to.dtype, (torch.bfloat16,)),
        (aten.sum.dim_IntList, ([-1], True)),
        (aten.chunk.default, (2, -1)),
    ],
)
def test_a_replacement_has_the_same_type(source: Graph, target: Any, args: tuple[Any, ...]) -> None:
    graph = toy(source, lambda b: b.call(aten.relu.default, b.hidden()))
    relu = graph.output
    new = graph.call(target, relu.args[0], *args, like=relu)
    with pytest.raises(AssertionError, match=rf"{relu} \(.*\) is .*, its replacement {new} is"):
        graph.replace(relu, new)
    assert graph.output is relu


def test_a_replacement_of_several_values_has_the_same_types(source: Graph) -> None:
    graph = toy(
        source, lambda b: b.call(operator.getitem, b.call(aten.chunk.default, b.hidden(), 2, -1), 0)
    )
    (chunk,) = graph.nodes(aten.chunk.default)
    uneven = graph.call(aten.split_with_sizes.default, chunk.args[0], [3, 5], -1, like=chunk)
    with pytest.raises(AssertionError, match="its replacement"):
        graph.replace(chunk, uneven)
    even = graph.call(aten.split_with_sizes.default, chunk.args[0], [4, 4], -1, like=chunk)
    graph.replace(chunk, even)
    assert graph.output.args == (even, 0)


def test_nodes_are_in_program_order(source: Graph) -> None:
    graph = source.clone("prefill")
    everything = graph.nodes()
    assert everything == [n for n in graph.fx.nodes if n.op == "call_function"]
    some = graph.nodes(aten.cos.default, aten.sin.default)
    assert [n.target for n in some] == [aten.cos.default, aten.sin.default]
    assert graph.nodes(aten.relu.default) == []


def test_symbols_are_named_whole(source: Graph) -> None:
    """`s4` is no part of `s48`."""
    graph = source.clone("prefill")
    graph.symbols = {"tokens": "s4", "seqs": "s48"}  # type: ignore[dict-item]
    assert graph.named("s48 + s4") == "seqs + tokens"  # type: ignore[arg-type]
    assert graph.named(4) == "4"
