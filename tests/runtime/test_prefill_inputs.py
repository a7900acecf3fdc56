"""A prefill's inputs on the host; `tests/test_captured_prefill.py` runs them on a GPU."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
import torch

from minivllm.ops.chunks import chunk_metadata
from minivllm.runtime.prefill_inputs import ALIGNMENT, SPECS, Bucket, Row, prefill_inputs

IDS = list(range(1000, 1400))
ROWS = [
    Row(IDS, 0, 130, slot=3, blocks=[5, 2, 7], snapshots=[(64, 9), (128, 11)]),
    Row(IDS, 70, 75, slot=1, blocks=[4, 6], copies=2, fork_slots=[6]),
    Row(IDS, 128, 192, slot=2, blocks=[8, 10, 12], all_logits=True, snapshots=[(192, 13)]),
]


def test_exact_inputs() -> None:
    inputs = prefill_inputs(ROWS).views()
    cu_seqlens, chunk_indices = chunk_metadata([130, 5, 64])
    expected = {
        "input_ids": IDS[:130] + IDS[70:75] + IDS[128:192],
        "positions": [*range(130), *range(70, 75), *range(128, 192)],
        "state_slots": [3, 1, 2],
        "num_computed_tokens": [0, 70, 128],
        "kv_indptr": [0, 3, 5, 8],
        "kv_indices": [5, 2, 7, 4, 6, 8, 10, 12],
        "seq_lens": [130, 75, 192],
        "slot_mapping": [
            *range(320, 384), *range(128, 192), 448, 449, *range(390, 395), *range(768, 832),
        ],
        "logits_rows": [129, 134, 134, *range(135, 199), 198],
        "cu_seqlens": cu_seqlens.tolist(),
        "chunk_indices": chunk_indices.tolist(),
        "chunk_slots": [9, 11, 0, 0, 13],
        "token_slots": [3, 1, 6, *[0] * 64, 2],
    }  # fmt: skip
    assert inputs.keys() == expected.keys()
    for name, value in inputs.items():
        assert value.dtype == SPECS[name].dtype and value.tolist() == expected[name], name


def test_padded_inputs() -> None:
    """Surplus tokens are a sequence of nobody's slot and block; the given ones stay as they are."""
    bucket = Bucket(256, 8)
    exact, padded = prefill_inputs(ROWS[:2]).views(), prefill_inputs(ROWS[:2], bucket).views()
    for name, value in padded.items():
        same = len(exact[name])
        if name == "cu_seqlens":
            same -= 1
        assert torch.equal(value[:same], exact[name][:same]), name
        if name not in ("chunk_indices", "cu_seqlens", "kv_indptr", "slot_mapping"):
            assert not value[same:].any(), name
    assert padded["input_ids"].shape == padded["slot_mapping"].shape == (256,)
    assert padded["state_slots"].shape == padded["logits_rows"].shape == (8,)
    assert padded["token_slots"].tolist() == [3, 1, 6, 0, 0, 0, 0, 0]
    assert (padded["slot_mapping"][135:] < 64).all()
    assert padded["cu_seqlens"].tolist() == [0, 130, 135, 135, 135, 135, 135, 135, 256]
    assert len(padded["chunk_slots"]) == len(padded["chunk_indices"])


def test_a_snapshot_stands_behind_a_chunk() -> None:
    for start, end in ((0, 60), (10, 64), (0, 192)):
        row = Row(IDS, start, 130, slot=3, blocks=[5, 2, 7], snapshots=[(end, 9)])
        with pytest.raises(AssertionError):
            prefill_inputs([row])


@pytest.mark.parametrize("bucket", [None, Bucket(256, 8)])
def test_a_copy_of_the_bytes_has_the_same_inputs(bucket: Bucket | None) -> None:
    """At addresses that are equally aligned in every bucket."""
    inputs = prefill_inputs(ROWS[:2], bucket)
    there = inputs.views(inputs.tensor().clone())
    for name, value in inputs.views().items():
        assert torch.equal(there[name], value), name
        assert (there[name].data_ptr() - there["input_ids"].data_ptr()) % ALIGNMENT == 0, name


def test_a_bucket_of_padding_alone() -> None:
    bucket = Bucket(64, 2)
    inputs = prefill_inputs([], bucket).views()
    assert inputs.pop("slot_mapping").tolist() == list(range(64))
    assert inputs.pop("cu_seqlens").tolist() == [0, 0, 64]
    assert inputs.pop("chunk_indices").tolist() == [[1, 0], [1, 1]]
    assert not any(value.any() for value in inputs.values())


def test_whatever_was_in_the_memory_is_overwritten() -> None:
    """A staging buffer holds another step's bytes; and an array's ids are those of a list."""
    bucket = Bucket(256, 8)
    expected = prefill_inputs(ROWS[:2], bucket).views()
    rows = [replace(row, token_ids=array("Q", IDS)) for row in ROWS[:2]]
    found = prefill_inputs(rows, bucket, memoryview(bytearray(b"\x07" * 100_000))).views()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def test_places_in_any_blocks() -> None:
    blocks = [1, 2**24 + 3, 1023, 2**31 - 1]
    row = Row([0] * 256, 10, 250, slot=1, blocks=blocks)
    places = [64 * block + n for block in blocks for n in range(64)]
    assert prefill_inputs([row]).views()["slot_mapping"].tolist() == places[10:250]
