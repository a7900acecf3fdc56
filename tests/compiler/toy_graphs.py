"""Small configs, hand-made graphs and traced modules for the tests of the compiler.

config = tiny_config(); graph = toy(source, lambda b: b.call(aten.relu.default, b.hidden()))
graph = traced(LlamaRMSNorm(8), torch.bfloat16)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from minivllm.compiler.bind import bind
from minivllm.compiler.graph import Graph, StateSpec, WeightSpec
from minivllm.compiler.passes.base import GraphPass, PassContext
from minivllm.compiler.passes.canonicalize import canonicalize
from minivllm.compiler.recipe import assemble
from minivllm.compiler.runner import run_passes
from minivllm.compiler.trace import _meta
from minivllm.model.config import MiniQwenConfig
from minivllm.ops.chunks import chunk_metadata

aten = torch.ops.aten
CPU = torch.device("cpu")


def tiny_config(**changes: Any) -> MiniQwenConfig:
    """Two layers, one of each kind, with sizes that are all different; but for `changes`."""
    sizes: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "layer_types": ("linear_attention", "full_attention"),
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
    }
    return MiniQwenConfig(**(sizes | changes))


class Builder:
    """Appends calls to a graph under construction."""

    def __init__(self, graph: Graph, anchor: Node) -> None:
        self.graph = graph
        self.anchor = anchor

    def input(self, name: str) -> Node:
        return self.graph.input(name)

    def state(self, name: str, kind: str, *shape: int) -> Node:
        return self.graph.state(name, StateSpec(kind, shape, torch.float32))

    def weight(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Node:
        self.graph.weights[name] = WeightSpec(shape, dtype)
        return self.graph._add_leaf("get_attr", name, shape, dtype)

    def call(self, target: Any, *args: Any, module: str = "layers.0.mixer", **kwargs: Any) -> Node:
        self.anchor.meta["module"] = module
        return self.graph.call(target, *args, like=self.anchor, **kwargs)

    def hidden(self, width: int = 8, dtype: torch.dtype = torch.float32) -> Node:
        """`[tokens, width]`, from the token ids."""
        table = self.weight("embed_tokens.weight", 61, width, dtype=dtype)
        return self.call(aten.embedding.default, table, self.input("input_ids"), module="")


def toy(source: Graph, body: Callable[[Builder], Node], phase: str = "prefill") -> Graph:
    """The graph that `body` builds and whose output it returns; symbols are those of `source`."""
    symbols = source.clone(phase).symbols
    graph = Graph(fx.Graph(), phase, symbols, source.fake_mode)
    anchor = graph.fx.output(None)
    anchor.meta = {"module": "", "source": "toy.py:1"}
    anchor.args = (body(Builder(graph, anchor)),)
    anchor.meta = {}
    return graph


class _Embedded(nn.Module):
    """A module that reads an embedding of the token ids, and their positions if it takes them."""

    def __init__(self, body: nn.Module, width: int, positions: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(61, width)
        self.body = body
        self.positions = positions

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        return self.body(x, positions) if self.positions else self.body(x)


def traced(
    body: nn.Module, dtype: torch.dtype, width: int = 8, *, positions: bool = False
) -> tuple[Graph, dict[str, Tensor]]:
    """A module behind an embedding, by the model's front end, and its weights, which are random.

    Args:
        positions: whether `body` takes the tokens' positions as well.

    Returns:
        the graph behind canonicalize, and random weights by name in `dtype`; those called
        `inv_freq` stay as they are.
    """
    module = _Embedded(body, width, positions)
    weights = {}
    for i, (name, value) in enumerate(module.state_dict(keep_vars=True).items()):
        if not name.endswith("inv_freq"):
            value.data = (0.3 * randn(*value.shape, seed=i) + 0.4).to(dtype)
        weights[name] = value.detach().clone()
    for name, value in module.named_buffers():
        weights[name] = value.clone()
    ids = torch.zeros(8, dtype=torch.int64, device="meta")
    tokens = {0: torch.export.Dim("tokens")}
    exported = torch.export.export(
        module.to("meta"), (ids, ids.clone()), dynamic_shapes=(tokens, tokens)
    )
    lifted = exported.graph_signature
    names = lifted.inputs_to_parameters | lifted.inputs_to_buffers
    graph = Graph(fx.Graph(), "prefill", {}, None)  # type: ignore[arg-type]
    mapping: dict[Node, Node] = {}
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            name, value = names.get(node.name, node.name), node.meta["val"]
            if node.name in names:
                graph.weights[name] = WeightSpec(tuple(value.shape), value.dtype)
                mapping[node] = graph.fx.create_node("get_attr", name, name=name.replace(".", "_"))
            else:
                graph.symbols["tokens"] = value.shape[0]
                graph.fakes = value.fake_mode
                mapping[node] = graph.fx.placeholder(name)
        elif node.op == "call_function":
            mapping[node] = graph.fx.node_copy(node, lambda n: mapping[n])
        else:
            graph.fx.output(mapping[node.args[0][0]])
            break
        mapping[node].meta = _meta(node)
    # inputs first, as in the model's graphs
    for node in reversed([n for n in graph.fx.nodes if n.op == "placeholder"]):
        if not node.users:
            graph.fx.erase_node(node)
        else:
            next(iter(graph.fx.nodes)).prepend(node)
    canonicalize(graph)
    return graph, weights


def apply(graph: Graph, graph_pass: GraphPass, context: PassContext) -> int:
    """Run one pass with the runner's checks but without expected counts; returns its matches."""
    graph_pass = type(graph_pass)()
    graph_pass.expected = lambda phase, context: None  # type: ignore[method-assign]
    (report,) = run_passes(graph, [graph_pass], context)
    numbers = [name for name, symbol in graph.symbols.items() if str(symbol).isdigit()]
    assert numbers == [], "a comparison has tied a symbol to a number"
    return report.matches


def evaluate(
    graph: Graph,
    inputs: Mapping[str, Tensor],
    weights: Mapping[str, Tensor] | None = None,
    states: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """The graph's output, for weights by the names of the model's state_dict."""
    needed = {p.name for n, s in graph.weights.items() for p in s.parts} | set(graph.weights)
    given = {n: w for n, w in (weights or {}).items() if n in needed}
    return bind(graph, assemble(graph.weights, given), states or {}, CPU, torch.float32)(**inputs)


def code(graph: Graph) -> str:
    """The graph as Python, as torch writes it: equal for equal graphs."""
    return graph.fx.python_code("self").src


def targets(graph: Graph) -> list[str]:
    """The calls of a graph, by name, in program order."""
    return [str(n.target).removesuffix(".default") for n in graph.nodes()]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# A batch of three sequences for the toy graphs, whose embedding is [61, 8], and their slots.
IDS = torch.randint(61, (9,), generator=torch.Generator().manual_seed(0))
TABLE = {"embed_tokens.weight": randn(61, 8, seed=1)}
LENGTHS = (3, 1, 5)
SLOTS = (4, 2, 5)


def whole_sequences(graph: Graph, weights: dict[str, Tensor]) -> list[Tensor]:
    """What the graph as traced says of each toy sequence by itself."""
    return [evaluate(graph, {"input_ids": ids}, weights) for ids in IDS.split(list(LENGTHS))]


def pools(graph: Graph, entries: int = 7) -> dict[str, Tensor]:
    """A pool for each state of the graph, all NaN."""
    return {n: torch.full((entries, *s.shape), torch.nan) for n, s in graph.states.items()}


def packed(start: tuple[int, ...], end: tuple[int, ...]) -> dict[str, Tensor]:
    """The inputs of a step that runs each toy sequence from `start` to `end`."""
    lengths = [b - a for a, b in zip(start, end, strict=True)]
    cu_seqlens, chunk_indices = chunk_metadata(lengths)
    sequences = IDS.split(list(LENGTHS))
    return {
        "input_ids": torch.cat([s[a:b] for s, a, b in zip(sequences, start, end, strict=True)]),
        "state_slots": torch.tensor(SLOTS),
        "num_computed_tokens": torch.tensor(start, dtype=torch.int32),
        "cu_seqlens": cu_seqlens,
        "chunk_indices": chunk_indices,
        "chunk_slots": torch.zeros(len(chunk_indices), dtype=torch.int32),
    }
