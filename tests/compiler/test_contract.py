"""Each rule of the contract, broken on purpose: the error names the node and the rule."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from toy_graphs import Builder, aten, toy

from minivllm.compiler.compile import CompiledModel
from minivllm.compiler.contract import ContractError, check, is_mutation, mutated_arguments
from minivllm.compiler.graph import Graph, StateSpec
from minivllm.ops import OPS

Body = Callable[[Builder], Node]


def refuses(graph: Graph, message: str, may_mutate: bool = True) -> None:
    with pytest.raises(ContractError, match=message):
        check(graph, may_mutate=may_mutate)


def relu(b: Builder) -> Node:
    return b.call(aten.relu.default, b.hidden())


def legal(b: Builder) -> Node:
    """Reads and writes a state, splits, and returns a tensor."""
    x, slots = b.hidden(), b.input("state_slots")
    pool = b.state("layers.0.conv", "slot", 4)
    parts = b.call(aten.chunk.default, x, 2, -1)
    new = b.call(operator.getitem, parts, 0)
    old = b.call(aten.index_select.default, pool, 0, slots)
    b.call(aten.index_copy_.default, pool, 0, slots, new)
    return b.call(aten.add.Tensor, old, new)


def test_legal_graphs(source: Graph, canonical: Graph, compiled: CompiledModel) -> None:
    check(toy(source, relu), may_mutate=False)
    check(toy(source, legal, "decode"), may_mutate=True)
    check(canonical, may_mutate=False)
    for graph in compiled.graphs.values():
        check(graph, may_mutate=True)


def test_the_graph_as_traced_is_not_legal_yet(source: Graph) -> None:
    refuses(source, r"node _assert_tensor_metadata\w* \(rotary_emb\) names a device")


def test_an_unknown_input(source: Graph) -> None:
    graph = toy(source, relu)
    with graph.fx.inserting_before(graph.output):
        graph.fx.placeholder("mask")
    refuses(graph, r"node mask \(\?\) is not an input of input_ids, positions")


def test_a_leaf_of_no_table(source: Graph) -> None:
    graph = toy(source, relu)
    del graph.weights["embed_tokens.weight"]
    refuses(graph, r"node embed_tokens_weight \(\) names neither a weight nor a state")


@pytest.mark.parametrize(
    "spec",
    [
        StateSpec("slot", (5,), torch.float32),
        StateSpec("slot", (4, 1), torch.float32),
        StateSpec("slot", (4,), torch.bfloat16),
    ],
)
def test_a_state_that_differs_from_its_declaration(source: Graph, spec: StateSpec) -> None:
    graph = toy(source, legal, "decode")
    graph.states["state.layers.0.conv"] = spec
    refuses(graph, r"node state_layers_0_conv \(\) differs from StateSpec")


def test_a_weight_that_differs_from_its_declaration(source: Graph) -> None:
    graph = toy(source, relu)
    node = next(n for n in graph.fx.nodes if n.op == "get_attr")
    node.meta["val"] = node.meta["val"].to(torch.bfloat16)
    refuses(graph, r"node embed_tokens_weight \(\) differs from WeightSpec")


def unknown_function(b: Builder) -> Node:
    return b.call(torch.relu, b.hidden())


def unknown_namespace(b: Builder) -> Node:
    return b.call(torch.ops.prims.sin.default, b.hidden())


def packet(b: Builder) -> Node:
    return b.call(torch.ops.aten.relu, b.hidden())


@pytest.mark.parametrize("body", [unknown_function, unknown_namespace, packet])
def test_a_call_of_something_else(source: Graph, body: Body) -> None:
    refuses(
        toy(source, body), r"node \w+ \(layers\.0\.mixer\) calls .*, which is no op of aten or mini"
    )


@pytest.mark.parametrize("key", ["val", "module", "source"])
def test_a_call_without_meta(source: Graph, key: str) -> None:
    graph = toy(source, relu)
    del graph.output.meta[key]
    refuses(graph, rf"node relu_default .* carries no {key}")


@pytest.mark.parametrize("name", ["embed_tokens_weight", "input_ids"])
def test_a_leaf_without_a_value(source: Graph, name: str) -> None:
    graph = toy(source, relu)
    del next(n for n in graph.fx.nodes if n.name == name).meta["val"]
    refuses(graph, rf"node {name} \(\) carries no val")


@pytest.mark.parametrize("change", [lambda v: v.int(), lambda v: v[:, None]])
def test_an_input_that_differs_from_the_vocabulary(
    source: Graph, change: Callable[[Tensor], Tensor]
) -> None:
    graph = toy(source, relu)
    node = next(n for n in graph.fx.nodes if n.op == "placeholder")
    with source.fake_mode:
        node.meta["val"] = change(node.meta["val"])
    refuses(graph, r"node input_ids \(\) differs from InputSpec")


@pytest.mark.parametrize(
    "body",
    [
        lambda b: b.call(aten.zeros.default, [2], device=torch.device("cpu")),
        lambda b: b.call(aten.to.device, b.hidden(), torch.device("meta"), torch.float32),
    ],
)
def test_a_device_literal(source: Graph, body: Body) -> None:
    refuses(toy(source, body), r"node \w+ \(layers\.0\.mixer\) names a device")


def test_a_call_of_another_kind(source: Graph) -> None:
    graph = toy(source, relu)
    with graph.fx.inserting_before(graph.output):
        graph.fx.call_method("relu", (graph.output.args[0],)).meta["module"] = "layers.1"
    refuses(graph, r"node relu \(layers\.1\) has kind call_method")


def test_mutation_before_the_lowering(source: Graph) -> None:
    refuses(
        toy(source, legal, "decode"),
        r"node index_copy__default \(layers\.0\.mixer\) changes its argument before lowering",
        may_mutate=False,
    )


def test_mutation_of_something_else_than_state(source: Graph) -> None:
    refuses(
        toy(source, lambda b: b.call(aten.relu_.default, b.hidden())),
        r"node relu__default .* changes embedding_default, which is not state",
    )
    refuses(
        toy(source, lambda b: b.call(aten.relu_.default, b.weight("norm.weight", 8))),
        r"changes norm_weight, which is not state",
    )

    def into(b: Builder) -> Node:
        x = b.hidden()
        return b.call(aten.relu.out, x, out=b.call(aten.neg.default, x))

    refuses(toy(source, into), r"node relu_out .* changes neg_default, which is not state")


def write_twice(b: Builder) -> Node:
    legal(b)
    return b.call(aten.mul_.Scalar, b.state("layers.0.conv", "slot", 4), 0.5)


def test_a_state_written_twice(source: Graph) -> None:
    refuses(
        toy(source, write_twice, "decode"),
        r"state\.layers\.0\.conv is written 2 times a step instead of once",
    )


def test_a_state_never_written(source: Graph) -> None:
    graph = toy(
        source,
        lambda b: b.call(
            aten.index_select.default,
            b.state("layers.0.conv", "slot", 4),
            0,
            b.input("state_slots"),
        ),
    )
    refuses(graph, r"state\.layers\.0\.conv is written 0 times a step instead of once")


def test_a_graph_that_fx_refuses(source: Graph) -> None:
    graph = toy(source, relu)
    embedding = graph.nodes(aten.embedding.default)[0]
    embedding.append(graph.output)  # nothing changes
    check(graph, may_mutate=False)
    graph.output.append(embedding)
    with pytest.raises(RuntimeError, match="was used before it has been defined"):
        check(graph, may_mutate=False)


def test_mutated_arguments(source: Graph) -> None:
    def body(b: Builder) -> Node:
        k, v = (b.state(f"layers.0.{n}_cache", "block", 16, 2, 4) for n in "kv")
        x = b.call(aten.unflatten.int, b.hidden(), -1, [2, 4])
        b.call(OPS["paged_kv_write"].overload, k, v, x, x, b.input("slot_mapping"))
        return x

    graph = toy(source, body)
    (write,) = graph.nodes(OPS["paged_kv_write"].overload)
    assert [n.target for n in mutated_arguments(write)] == [
        "state.layers.0.k_cache",
        "state.layers.0.v_cache",
    ]
    assert is_mutation(write)
    assert [is_mutation(n) for n in graph.fx.nodes if n is not write] == [False] * (
        len(graph.fx.nodes) - 1
    )
    parts = toy(
        source, lambda b: b.call(operator.getitem, b.call(aten.chunk.default, b.hidden(), 2), 0)
    )
    assert mutated_arguments(parts.output) == []
