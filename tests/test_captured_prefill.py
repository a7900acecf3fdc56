"""On a GPU: the compiled prefill graph, captured once for a bucket, replayed with other batches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from oracle import random_ids
from torch import Tensor

from bench.cuda_parity import compare, preset, runner
from minivllm.model.config import MiniQwenConfig
from minivllm.model.weights import dummy_weights, parameter_shapes
from minivllm.ops.chunks import CHUNK_SIZE, chunk_tensors, max_chunks, padded_chunk_lists
from minivllm.ops.paged_attention import BLOCK_SIZE
from minivllm.presets import model_preset
from minivllm.runtime.model_runner import ModelRunner
from minivllm.runtime.prefill_inputs import Row, prefill_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

TOKENS, SEQS, KV_BLOCKS = 320, 5, 15
BLOCKS = ((5, 2, 12, 9, 1), (7, 15, 4), (3, 6, 11), (8, 10), (13, 14))  # scattered
SLOTS = (4, 1, 6, 3, 7)
SNAPSHOTS = (2, 5)  # entries of the pool that are nobody's slot
# of each step, (sequence, start, end); later steps go on where earlier ones ended
STEPS: tuple[tuple[tuple[int, int, int], ...], ...] = (
    ((0, 0, 130), (1, 0, 1)),
    ((0, 130, 131), (2, 0, 64), (1, 1, 160)),
    ((3, 0, 1),),
    ((0, 131, 300), (3, 1, 2), (2, 64, 67), (4, 0, 100)),
    ((0, 0, 320),),  # fills the bucket, and a slot with a past starts anew
    ((0, 0, 64), (1, 0, 64), (2, 0, 64), (3, 0, 64), (4, 0, 64)),
)


def four_layers() -> tuple[MiniQwenConfig, dict[str, Tensor]]:
    """The 0.8B's layers, one of each place in its pattern, under a small vocabulary."""
    options = model_preset("miniqwen08b")
    assert options.architecture is not None
    small = {"num_hidden_layers": 4, "vocab_size": 4096, "eos_token_id": 0}
    config = MiniQwenConfig.from_hf({**options.architecture, **small})
    return config, dummy_weights(parameter_shapes(config), torch.bfloat16, "cpu", seed=0)


@pytest.fixture(scope="module", params=["tiny", "four_layers"])
def model(request: pytest.FixtureRequest) -> tuple[ModelRunner, int]:
    config, weights = preset("tiny") if request.param == "tiny" else four_layers()
    device = torch.device("cuda")
    return runner(config, weights, torch.bfloat16, None, device, "compiled"), config.vocab_size


def rows_of(step: Sequence[tuple[int, int, int]], vocab: int) -> list[Row]:
    """The first two with a whole chunk leave a snapshot behind it."""
    ids = [random_ids(320, vocab, seed=n) for n in range(len(SLOTS))]
    free = list(SNAPSHOTS)
    return [
        Row(ids[n], start, end, SLOTS[n], BLOCKS[n], snapshots=(
            [(start + CHUNK_SIZE, free.pop(0))] if end - start >= CHUNK_SIZE and free else []))
        for n, start, end in step
    ]  # fmt: skip


def padded(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs of a step, in the bucket's sizes: what the runner has to build."""
    lengths = inputs["cu_seqlens"].diff().tolist()
    chunks = max_chunks(TOKENS, SEQS)
    cu_seqlens, chunk_indices = chunk_tensors(*padded_chunk_lists(lengths, TOKENS, SEQS, chunks))

    def fill(name: str, size: int, value: int = 0) -> Tensor:
        return F.pad(inputs[name], (0, size - inputs[name].shape[0]), value=value)

    surplus = TOKENS - sum(lengths)
    places = torch.arange(surplus) % BLOCK_SIZE  # in block 0
    return {
        "input_ids": fill("input_ids", TOKENS),
        "positions": fill("positions", TOKENS),
        "state_slots": fill("state_slots", SEQS),
        "num_computed_tokens": fill("num_computed_tokens", SEQS),
        "cu_seqlens": cu_seqlens,
        "chunk_indices": chunk_indices,
        "chunk_slots": fill("chunk_slots", chunks),
        "kv_indptr": fill("kv_indptr", SEQS + 1, int(inputs["kv_indptr"][-1])),
        "kv_indices": fill("kv_indices", KV_BLOCKS),
        "seq_lens": fill("seq_lens", SEQS),
        "slot_mapping": torch.cat([inputs["slot_mapping"], places]),
        "logits_rows": fill("logits_rows", SEQS),
    }


def on_gpu(inputs: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    return {name: inputs[name].cuda() for name in names}


class Pools:
    """What a model's pools hold."""

    def __init__(self, model: ModelRunner) -> None:
        self.storages = [pool.storage for pool in (model.slots, model.blocks)]

    def save(self) -> list[Tensor]:
        return [storage.clone() for storage in self.storages]

    def load(self, saved: Sequence[Tensor]) -> None:
        for storage, x in zip(self.storages, saved, strict=True):
            storage.copy_(x)


@torch.inference_mode()
def test_replays_are_fresh_runs(model: tuple[ModelRunner, int]) -> None:
    """Every bit of the logits, states and caches, whatever ran through the buffers before."""
    runner, vocab = model
    graph, pools = runner.graphs["prefill"], Pools(runner)
    for pool in (runner.slots, runner.blocks):
        pool.poison(list(range(pool.storage.shape[0])))
    batches = [prefill_inputs(rows_of(step, vocab)).views() for step in STEPS]
    kept = [batch["chunk_slots"].count_nonzero() for batch in batches]
    assert kept == [1, 2, 0, 2, 1, 2]
    buffers = on_gpu(padded(batches[0]), graph.inputs)
    begin = pools.save()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph(**buffers)  # builds kernels and workspaces, which a capture must not
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        logits = graph(**buffers)

    pools.load(begin)
    worst = 0.0
    for batch in batches:
        count = batch["state_slots"].shape[0]
        before = pools.save()
        exact = graph(**on_gpu(batch, graph.inputs)).float().cpu()
        pools.load(before)
        fresh = graph(**on_gpu(padded(batch), graph.inputs))[:count].clone()
        after = pools.save()
        pools.load(before)
        for name, x in padded(batch).items():
            if name in buffers:
                buffers[name].copy_(x)
        captured.replay()
        assert fresh.isfinite().all()
        assert torch.equal(logits[:count], fresh)
        for now, then in zip(pools.save(), after, strict=True):
            assert torch.equal(now[1:], then[1:])  # slot 0 and block 0 are padding's
        written = {*batch["state_slots"].tolist(), *batch["chunk_slots"].tolist()} - {0}
        for view in runner.slots.views.values():
            assert view[sorted(written)].isfinite().all()
        errors = compare(logits[:count].float().cpu(), exact)
        worst = max(worst, errors.rms)
    # cuBLAS may pick another kernel for another number of rows, so sizes may differ by rounding
    assert worst < 0.02


@torch.inference_mode()
def test_the_graph_waits_for_nothing(model: tuple[ModelRunner, int]) -> None:
    runner, vocab = model
    graph = runner.graphs["prefill"]
    inputs = on_gpu(padded(prefill_inputs(rows_of(STEPS[0], vocab)).views()), graph.inputs)
    graph(**inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph(**inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
