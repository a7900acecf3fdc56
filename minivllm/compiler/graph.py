"""The compiler's graph: flat FX whose nodes all carry fake values, with weights and state named.

Owns construction and rewriting, so that every new node is typed the moment it is made. Does not
own which rewrites happen (passes) nor what a legal graph is (contract.py).

    new = graph.call(torch.ops.aten.index_select.default, hidden, 0, graph.input("logits_rows"),
                     like=head)

Weights are `get_attr` nodes without data, named as in the model's state_dict. State is a
`get_attr` node named `state.*`. Inputs come from the fixed vocabulary `INPUTS`; their dims are
symbols shared by the whole graph. A graph of phase `MODULE` is a user's own module: its inputs are
the module's, its activations have any rank, and it has no state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from minivllm.ops.op import ALL_DTYPES

if TYPE_CHECKING:
    from minivllm.compiler.misses import Misses

PHASES = ("prefill", "decode")
MODULE = "module"  # the phase of a user's own module: any inputs, no state
META = torch.device("meta")
SYMBOLS = ("tokens", "seqs", "rows", "blocks", "kv_blocks", "chunks", "slots", "num_blocks")


@dataclass(frozen=True)
class InputSpec:
    """An input of the vocabulary: its dims (symbol names or sizes), dtype and meaning."""

    dims: tuple[str | int, ...]
    dtype: torch.dtype
    meaning: str


INPUTS: dict[str, InputSpec] = {
    "input_ids": InputSpec(("tokens",), torch.int64, "token ids, sequences packed"),
    "positions": InputSpec(("tokens",), torch.int64, "position of each token in its sequence"),
    "state_slots": InputSpec(("seqs",), torch.int64, "state slot of each sequence; 0: padding"),
    "num_computed_tokens": InputSpec(
        ("seqs",), torch.int32, "tokens before this chunk; 0: the slot's old content is not read"
    ),
    "cu_seqlens": InputSpec(("seqs + 1",), torch.int32, "where each sequence's tokens start"),
    "chunk_indices": InputSpec(("chunks", 2), torch.int32, "(sequence, chunk of 64 tokens)"),
    "chunk_slots": InputSpec(
        ("chunks",), torch.int32, "state slot that keeps a snapshot behind each chunk; 0: none"
    ),
    "block_table": InputSpec(("seqs", "blocks"), torch.int32, "KV blocks of each sequence"),
    "kv_indptr": InputSpec(("seqs + 1",), torch.int32, "where each sequence's KV blocks start"),
    "kv_indices": InputSpec(("kv_blocks",), torch.int32, "KV blocks of all sequences, packed"),
    "seq_lens": InputSpec(("seqs",), torch.int32, "length of each sequence, this step included"),
    "slot_mapping": InputSpec(("tokens",), torch.int64, "place of each token in the KV cache"),
    "logits_rows": InputSpec(("rows",), torch.int64, "tokens whose logits are wanted"),
}


@dataclass(frozen=True)
class WeightPart:
    """Rows of a merged weight: `start:start + rows` hold the tensor `name` of the state_dict."""

    name: str
    start: int
    rows: int


@dataclass(frozen=True)
class WeightSpec:
    """A weight the graph reads.

    Attributes:
        parts: the recipe of a merged weight, which the loader executes; rows that no part covers
            are zero. Empty: the tensor of the same name in the model's state_dict.
        shared: another tensor lies in its memory, so that it cannot be moved into a merged one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[WeightPart, ...] = ()
    shared: bool = False


@dataclass(frozen=True)
class StateSpec:
    """State that outlives a step.

    Attributes:
        kind: "slot" (one entry a sequence) or "block" (one entry a block of the KV cache).
        shape: of one entry; the pool adds a leading dim.
        dtype: of the pool.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def symbol(self) -> str:
        """The symbol of the pool's leading dim."""
        return "slots" if self.kind == "slot" else "num_blocks"

    @property
    def bytes_per_entry(self) -> int:
        """Bytes of one slot or block."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass
class Graph:
    """A flat FX graph and the tables that give its leaves a meaning."""

    fx: fx.Graph
    phase: str
    symbols: dict[str, torch.SymInt]
    fakes: FakeTensorMode | None  # of the values; None: read from a file, not to be rewritten
    weights: dict[str, WeightSpec] = field(default_factory=dict)
    states: dict[str, StateSpec] = field(default_factory=dict)
    stage: str = "trace"  # the pass that runs: new nodes carry its name
    inputs: Mapping[str, InputSpec] = field(default_factory=lambda: INPUTS)
    device: torch.device = META  # of new leaves' fake values
    misses: Misses | None = None  # what the last pass noted and looked for
    # fake values by op and types, for all clones
    inferred: dict[Any, Any] = field(default_factory=dict, repr=False)

    def clone(self, phase: str) -> Graph:
        """A copy to rewrite. In decode every sequence has one token, so `seqs` is `tokens`."""
        copied = fx.Graph()
        mapping: dict[Node, Node] = {}
        output = copied.graph_copy(self.fx, mapping)
        copied.output(output)
        symbols = dict(self.symbols)
        if phase == "decode":
            symbols["seqs"] = symbols["tokens"]
        return Graph(
            copied,
            phase,
            symbols,
            self.fakes,
            dict(self.weights),
            dict(self.states),
            inputs=self.inputs,
            device=self.device,
            inferred=self.inferred,
        )

    # reading

    def nodes(self, *targets: Any) -> list[Node]:
        """The calls of the given targets (all calls if none is given), in program order."""
        return [
            n
            for n in self.fx.nodes
            if n.op == "call_function" and n.target in (targets or (n.target,))
        ]

    @property
    def output(self) -> Node:
        """The node whose value the graph returns."""
        (value,) = self.fx.output_node().args
        assert isinstance(value, Node)
        return value

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations."""
        return self.output.meta["val"].dtype

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that patterns are looked for in: of a user's module, its matrices'.

        A module without matrices has its other weights' or, without any, its inputs' dtypes. Those
        that our ops do not know are left out.
        """
        if self.phase != MODULE:
            return (self.dtype,)
        matrices = [w.dtype for w in self.weights.values() if len(w.shape) > 1]
        others = [w.dtype for w in self.weights.values()]
        given = [i.dtype for i in self.inputs.values()]
        for dtypes in (matrices, others, given):
            found = tuple(dict.fromkeys(d for d in dtypes if d in ALL_DTYPES))
            if found:
                return found
        return ()

    @property
    def input_names(self) -> tuple[str, ...]:
        """The inputs of this graph, in the vocabulary's order of first use."""
        return tuple(str(n.target) for n in self.fx.nodes if n.op == "placeholder")

    def named(self, size: int | torch.SymInt) -> str:
        """A size as text, with the vocabulary's symbol names."""
        if isinstance(size, int):
            return str(size)
        symbols = {n: s for n, s in self.symbols.items() if n != "seqs" or self.phase != "decode"}
        for name, symbol in symbols.items():  # quicker than to print them
            if isinstance(size, torch.SymInt) and symbol.node.expr == size.node.expr:
                return name
        names = {str(symbol): name for name, symbol in symbols.items()}
        return re.sub(r"\w+", lambda found: names.get(found[0], found[0]), str(size))

    # writing

    @property
    def fake_mode(self) -> FakeTensorMode:
        """What new values are inferred in."""
        assert self.fakes is not None, "a graph that was read from a file is not rewritten"
        return self.fakes

    def input(self, name: str) -> Node:
        """The placeholder of an input of the vocabulary, made at its first use."""
        for node in self._leaves("placeholder"):
            if node.target == name:
                return node
        spec = self.inputs[name]
        return self._add_leaf("placeholder", name, spec.dims, spec.dtype)

    def state(self, name: str, spec: StateSpec) -> Node:
        """The node of a state pool, `[slots or num_blocks, *spec.shape]`, made at first use."""
        name = f"state.{name}"
        if name in self.states:
            assert self.states[name] == spec, f"{name} was declared as {self.states[name]}"
            return next(n for n in self._leaves("get_attr") if n.target == name)
        self.states[name] = spec
        return self._add_leaf("get_attr", name, (spec.symbol, *spec.shape), spec.dtype)

    def weight(self, name: str, spec: WeightSpec) -> Node:
        """The node of a new weight."""
        assert name not in self.weights, f"{name} is a weight already"
        self.weights[name] = spec
        return self._add_leaf("get_attr", name, spec.shape, spec.dtype)

    def call(self, target: Callable[..., Any], *args: Any, like: Node, **kwargs: Any) -> Node:
        """Insert a call before `like`, typed at once, with `like`'s module and source line."""
        with self.fx.inserting_before(like):
            node = self.fx.call_function(target, args, kwargs)
        node.meta = {key: like.meta[key] for key in ("module", "source")} | {"pass": self.stage}
        node.meta["val"] = self.infer(node)
        return node

    def replace(self, node: Node, new: Node) -> None:
        """Let `new`, of the same type, take the place of `node` and of what only it read."""
        old_type, new_type = (self._type(n.meta["val"]) for n in (node, new))
        assert old_type == new_type, (
            f"{node} ({node.meta['module']}) is {old_type}, its replacement {new} is {new_type}; "
            "reshape it, or cast it (aten.to.dtype), so that the two are alike"
        )
        node.replace_all_uses_with(new)
        self._erase(node)

    def _erase(self, node: Node) -> None:
        """Erase a node without users, and the calls that only it read."""
        pending = [node]
        while pending:
            dead = pending.pop()
            sources = dead.all_input_nodes
            self.fx.erase_node(dead)
            for source in sources:
                schema = getattr(source.target, "_schema", None)
                pure = source.op == "call_function" and not (schema and schema.is_mutable)
                if pure and not source.users and source not in pending:
                    pending.append(source)

    def infer(self, node: Node) -> Any:
        """The fake value of a call, from its arguments' fake values.

        Layers are alike, and to infer a value takes torch a millisecond: in a MiniQwen a call of
        the op and types of an earlier one has that one's value.
        """
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
        if self.phase == MODULE:
            # torch 2.11's linear asks a batch of rows for its number of elements, unless Python
            # answers
            with enable_python_dispatcher():
                return self._inferred(node, args, kwargs)
        key = (node.target, _types(args), _types(kwargs))
        if key not in self.inferred:
            self.inferred[key] = self._inferred(node, args, kwargs)
        return self.inferred[key]

    def _inferred(self, node: Node, args: Any, kwargs: Any) -> Any:
        assert callable(node.target)
        with self.fake_mode, torch.no_grad():
            return node.target(*args, **kwargs)

    def _leaves(self, op: str) -> Iterator[Node]:
        return (n for n in self.fx.nodes if n.op == op)

    def _add_leaf(
        self, op: str, target: str, dims: tuple[str | int, ...], dtype: torch.dtype
    ) -> Node:
        """A new leaf behind the last leaf of its kind: inputs first, then weights and state."""
        body = next(n for n in self.fx.nodes if n.op not in ("placeholder", op))
        with self.fx.inserting_before(body):
            node = self.fx.create_node(op, target, name=target.replace(".", "_"))
        with self.fake_mode:
            value = torch.empty([self._size(d) for d in dims], dtype=dtype, device=self.device)
        node.meta = {"module": "", "source": "", "pass": self.stage, "val": value}
        return node

    def _size(self, dim: str | int) -> int | torch.SymInt:
        if isinstance(dim, int):
            return dim
        return self.symbols["seqs"] + 1 if dim == "seqs + 1" else self.symbols[dim]

    def _type(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tuple(self.named(s) for s in value.shape), value.dtype, value.device.type
        if isinstance(value, (list, tuple)):
            return [self._type(v) for v in value]
        return type(value)


def _types(value: Any) -> Any:
    """What a call's value depends on: of tensors sizes and strides, of all else what it is."""
    if isinstance(value, torch.Tensor):
        sizes = [_expression(size) for size in (*value.shape, *value.stride())]
        return value.dtype, value.device, *sizes
    if isinstance(value, (list, tuple)):
        return isinstance(value, tuple), *(_types(v) for v in value)
    if isinstance(value, dict):
        return tuple((name, _types(v)) for name, v in value.items())
    if isinstance(value, torch.SymInt):
        return _expression(value)
    return type(value), value if isinstance(value, Hashable) else repr(value)


def _expression(size: int | torch.SymInt) -> Any:
    return size if isinstance(size, int) else size.node.expr
