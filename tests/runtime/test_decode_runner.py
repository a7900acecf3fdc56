"""Decode in buckets over static buffers, on the CPU: padding, block tables, and what is checked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engines import VOCAB, Builder, checkpoint
from oracle import random_ids
from torch import Tensor

from minivllm.runtime.decode_runner import DecodeRunner, bucket_sizes
from minivllm.runtime.model_runner import ModelRunner
from minivllm.runtime.newest_tokens import NewestTokens
from minivllm.runtime.prefill_inputs import Row

SEQS = 11


def test_buckets() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(3) == [1, 2, 3]
    assert bucket_sizes(8) == [1, 2, 4, 8]
    assert bucket_sizes(11) == [1, 2, 4, 8, 11]
    assert bucket_sizes(64)[-3:] == [48, 56, 64]
    assert bucket_sizes(256)[-3:] == [224, 240, 256]
    assert bucket_sizes(300)[-3:] == [256, 288, 300]
    for size in range(1, 400):
        found = bucket_sizes(size)
        assert found == sorted(set(found)) and found[-1] == size
        padding = [(b - a - 1) / b for a, b in itertools.pairwise(found)]
        assert max(padding, default=0) < 0.5


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    build = Builder(checkpoint(tmp_path_factory.mktemp("small")))
    found = build(max_num_seqs=SEQS, blocks=60).engine.runner
    assert isinstance(found, ModelRunner)
    return found


@pytest.fixture
def sequences(runner: ModelRunner) -> list[Row]:
    """The next token of eleven prefilled sequences of other lengths, in scattered places."""
    for pool in (runner.slots, runner.blocks):
        pool.poison(list(range(1, len(pool.storage))))
    free = iter(range(60, 0, -1))
    rows = []
    for n in range(SEQS):
        length = (1, 63, 64, 65, 130, 5, 127, 128, 200, 2, 70)[n]
        ids = random_ids(length + 40, VOCAB, seed=n)
        blocks = [next(free) for _ in range((length + 40) // 64 + 1)]
        rows.append(Row(ids, 0, length, 1 + (n * 3) % SEQS, blocks))
    runner.prefill(rows)
    return [Row(r.token_ids, r.end, r.end + 1, r.slot, r.blocks) for r in rows]


def unpadded(runner: ModelRunner, rows: list[Row]) -> Tensor:
    """The same graph called without buckets, on inputs built by hand."""
    width = max(len(r.blocks) for r in rows)
    table = torch.tensor([[*r.blocks, *[0] * (width - len(r.blocks))] for r in rows])
    positions = torch.tensor([r.start for r in rows])
    places = [r.blocks[r.start // 64] * 64 + r.start % 64 for r in rows]
    with torch.inference_mode():
        return runner.graphs["decode"](
            input_ids=torch.tensor([r.token_ids[r.start] for r in rows]),
            positions=positions,
            state_slots=torch.tensor([r.slot for r in rows]),
            block_table=table.int(),
            seq_lens=(positions + 1).int(),
            slot_mapping=torch.tensor(places),
        )


@pytest.mark.parametrize("count", range(1, SEQS + 1))
def test_every_batch_is_the_graph_without_padding(
    count: int, runner: ModelRunner, sequences: list[Row]
) -> None:
    """Bit for bit where the bucket is full; padding rows may change how products are summed."""
    chosen = sequences[SEQS - count :]
    pools = [pool.storage.clone() for pool in (runner.slots, runner.blocks)]
    expected = unpadded(runner, chosen)
    written = [pool.storage.clone() for pool in (runner.slots, runner.blocks)]
    for pool, storage in zip((runner.slots, runner.blocks), pools, strict=True):
        pool.storage.copy_(storage)
    logits = runner.decode(chosen)
    assert logits.shape == (count, VOCAB) and logits.isfinite().all()
    if count in runner.decoder.buckets:
        assert torch.equal(logits, expected)
        for pool, storage in zip((runner.slots, runner.blocks), written, strict=True):
            assert torch.equal(pool.storage, storage)
    else:
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_padding_rows_touch_only_what_is_nobodys(runner: ModelRunner, sequences: list[Row]) -> None:
    chosen = sequences[:3]  # in a bucket of four
    before = [pool.storage.clone() for pool in (runner.slots, runner.blocks)]
    runner.decode(chosen)
    slots, blocks = (
        {int(i) for i in (pool.storage != storage).any(1).nonzero()}
        for pool, storage in zip((runner.slots, runner.blocks), before, strict=True)
    )
    assert slots - {0} == {r.slot for r in chosen}
    assert blocks - {0} == {r.blocks[r.start // 64] for r in chosen}
    assert torch.equal(runner.decoder.rows[:, 3:], torch.zeros_like(runner.decoder.rows[:, 3:]))
    assert not runner.decoder.block_tables[0].any()


class Recorder:
    """A decode graph that only notes its inputs."""

    def __init__(self) -> None:
        self.inputs: dict[str, Tensor] = {}

    def __call__(self, **inputs: Tensor) -> Tensor:
        self.inputs = {name: value.clone() for name, value in inputs.items()}
        return torch.zeros(len(inputs["input_ids"]), 5)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[DecodeRunner, Recorder, list[Any]]]:
    """A runner over a `Recorder`, and the (slot, column, block) that each step sent."""
    graph, sent = Recorder(), []
    decoder = DecodeRunner(
        graph,  # type: ignore[arg-type]
        torch.device("cpu"),
        NewestTokens(6, torch.device("cpu")),
        max_num_seqs=4,
        max_blocks=5,
        checked=True,
    )
    put = Tensor.index_put_

    def spy(self: Tensor, indices: Any, values: Tensor) -> Tensor:
        sent.append(list(zip(*(x.tolist() for x in (*indices, values)), strict=True)))
        return put(self, indices, values)

    monkeypatch.setattr(Tensor, "index_put_", spy)
    yield decoder, graph, sent


def test_inputs_of_a_step(recorded: tuple[DecodeRunner, Recorder, list[Any]]) -> None:
    decoder, graph, _ = recorded
    decoder.tokens[[5, 1, 2]] = torch.tensor([7, 8, 9])
    logits = decoder.run([0, 64, 130], [5, 1, 2], [[3], [9, 4], [6, 2, 8, 1]])
    assert logits.shape == (3, 5)
    inputs = {name: value.tolist() for name, value in graph.inputs.items()}
    assert inputs == {
        "input_ids": [7, 8, 9, 0],
        "positions": [0, 64, 130, 0],
        "state_slots": [5, 1, 2, 0],
        # blocks behind a row's position are not of this step
        "block_table": [[3, 0, 0, 0, 0], [9, 4, 0, 0, 0], [6, 2, 8, 0, 0], [0] * 5],
        "seq_lens": [1, 65, 131, 0],
        "slot_mapping": [3 * 64, 4 * 64, 8 * 64 + 2, 0],
    }
    assert graph.inputs["seq_lens"].dtype == graph.inputs["block_table"].dtype == torch.int32


def test_only_changes_are_sent(recorded: tuple[DecodeRunner, Recorder, list[Any]]) -> None:
    decoder, graph, sent = recorded

    def step(slots: list[int], blocks: list[list[int]]) -> list[tuple[int, int, int]]:
        sent.clear()
        last = [len(b) * 64 - 1 for b in blocks]
        decoder.run(last, slots, blocks)
        rows = graph.inputs["block_table"].tolist()
        for row, expected in zip(rows, blocks, strict=False):
            assert row[: len(expected)] == expected
        assert len(sent) <= 1
        return sent[0] if sent else []

    assert step([2, 3], [[5], [6, 7]]) == [(2, 0, 5), (3, 0, 6), (3, 1, 7)]
    assert step([2, 3], [[5], [6, 7]]) == []
    assert step([3, 2], [[6, 7], [5]]) == [], "a row's place in the batch means nothing"
    assert step([3], [[6, 7, 8]]) == [(3, 2, 8)]
    assert step([2], [[5]]) == []
    # another request in the slot: more blocks, fewer, and fewer that begin alike
    assert step([2], [[9, 10, 11]]) == [(2, 0, 9), (2, 1, 10), (2, 2, 11)]
    assert step([2], [[12]]) == [(2, 0, 12)]
    assert step([3], [[6, 7]]) == [(3, 0, 6), (3, 1, 7)]
    assert step([3], [[6, 7, 13]]) == [(3, 2, 13)]
    assert step([2, 3], [[12, 1], [6, 7, 13]]) == [(2, 1, 1)]


def test_a_callers_list_may_grow(recorded: tuple[DecodeRunner, Recorder, list[Any]]) -> None:
    """Requests hand in their own list, to which the scheduler appends."""
    decoder, graph, sent = recorded
    blocks = [4]
    decoder.run([0], [1], [blocks])
    blocks.append(5)
    decoder.run([64], [1], [blocks])
    assert sent == [[(1, 0, 4)], [(1, 1, 5)]]
    assert graph.inputs["slot_mapping"].tolist() == [5 * 64]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (([0, 0], [2, 2], [[3], [4]]), "a slot runs twice"),
        (([0], [0], [[3]]), "0"),
        (([0], [6], [[3]]), "6"),
        (([-1], [1], [[3]]), "-1"),
        (([64], [1], [[3]]), "64"),
        (([0], [1], [[]]), "0"),
        (([0], [1], [[3, 0]]), "0"),
        (([0], [1], [[1, 2, 3, 4, 5, 6]]), "6"),
        (([0, 0], [1], [[3]]), "rows of other"),
        (([0], [1], [[3], [4]]), "rows of other"),
    ],
)
def test_wrong_inputs_are_caught(
    inputs: Any, message: str, recorded: tuple[DecodeRunner, Recorder, list[Any]]
) -> None:
    decoder, graph, sent = recorded
    with pytest.raises(AssertionError, match=message):
        decoder.run(*inputs)
    assert not graph.inputs and not sent


def test_a_buffer_that_moved_is_caught(
    recorded: tuple[DecodeRunner, Recorder, list[Any]],
) -> None:
    decoder, _, _ = recorded
    decoder.rows = decoder.rows.clone()
    with pytest.raises(AssertionError, match="a static buffer has moved"):
        decoder.run([0], [1], [[3]])
