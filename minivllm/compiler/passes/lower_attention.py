"""lower_attention: keys and values go to the paged cache, attention reads them from there.

    %o = attention(%q, %k, %v, s)   ->   paged_kv_write(%state.layers.3.k_cache,
                                                        %state.layers.3.v_cache,
                                                        %k, %v, %slot_mapping)
                                         %o = paged_attention_prefill(%q, %state.layers.3.k_cache,
                                                  %state.layers.3.v_cache, %kv_indptr,
                                                  %kv_indices, %cu_seqlens, %seq_lens, s)

In decode, `paged_attention_decode` with `block_table` in the place of the first three. The write
stands before the read: a token attends to itself.
"""

from __future__ import annotations

from torch.fx import Node

from minivllm.compiler.graph import Graph, StateSpec
from minivllm.compiler.passes.base import GraphPass, PassContext, layer_of
from minivllm.ops import OPS

BLOCKS = {"prefill": ("kv_indptr", "kv_indices", "cu_seqlens"), "decode": ("block_table",)}


class LowerAttention(GraphPass):
    """Replace the opaque attention by a cache write and attention over the cache."""

    name = "lower_attention"
    mandatory = True
    mutates = True

    def expected(self, phase: str, context: PassContext) -> list[str]:
        return [f"layers.{i}" for i in context.config.attention_layers]

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        context.misses.looked_for(OPS["attention"].overload)
        nodes = graph.nodes(OPS["attention"].overload)
        return [self._lower(graph, node, context.block_size) for node in nodes]

    def _lower(self, graph: Graph, node: Node, block_size: int) -> str:
        q, k, v, scale = node.args
        assert isinstance(k, Node)
        key = k.meta["val"]
        layer = layer_of(node)
        spec = StateSpec("block", (block_size, *key.shape[1:]), key.dtype)
        caches = [graph.state(f"{layer}.{name}", spec) for name in ("k_cache", "v_cache")]
        places = graph.input("slot_mapping")
        graph.call(OPS["paged_kv_write"].overload, *caches, k, v, places, like=node)
        rows = [graph.input(name) for name in (*BLOCKS[graph.phase], "seq_lens")]
        attention = OPS[f"paged_attention_{graph.phase}"].overload
        graph.replace(node, graph.call(attention, q, *caches, *rows, scale, like=node))
        return layer
