"""`python -m minivllm.inspect`: a model compiled without weights, and its table."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from minivllm.inspect import inspect
from minivllm.run import main


def rows(text: str) -> dict[str, list[str]]:
    """The rows of the last phase's table by their first cell."""
    table = text[text.rindex("| pass |") :].split("\n\n")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return {
        cells[0]: cells[1:] for cells in ([c.strip() for c in x.split("|")[1:-1]] for x in lines)
    }


def test_the_decode_step_of_the_08b(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["+model=miniqwen08b", f"compiler.dump_dir={tmp_path}"], inspect) == 0
    decode = rows(capsys.readouterr().out)
    assert next(iter(decode)) == "source" and list(decode)[-1] == "prefetch_states"
    launches = [int(cells[3]) for cells in decode.values()]
    # 97 linears, of which 48 are two kernels, the embedding and its norm, 36 state ops, 6 of each
    # of the three of attention, of which the one over the cache is two
    assert launches[-1] == 97 + 48 + 2 + 36 + 4 * 6 == 207
    sites = {name: cells[0] for name, cells in decode.items()}
    assert sites["fuse_norms"] == "79" and sites["inplace_state"] == "36"
    assert sites["prefetch_states"] == "36"
    # weights once (1,504.8 MB), 18 states in and out (19.76 MB each way), 256 tokens of KV
    assert decode["prefetch_states"][2:] == decode["inplace_state"][2:], "it moves what it moved"
    megabytes = float(decode["prefetch_states"][4].replace(",", ""))
    assert 1504.8 + 2 * 19.76 + 3.1 < megabytes < 1.005 * (1504.8 + 2 * 19.76 + 3.1)
    assert len(list((tmp_path / "decode").glob("*.txt"))) == len(decode)


def test_eager_and_disabled_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["+model=tiny", "compiler.mode=eager"], inspect) == 0
    assert list(rows(capsys.readouterr().out)) == [
        "source",
        "canonicalize",
        "lower_mixers",
        "lower_attention",
    ]
    assert main(["+model=tiny", "compiler.disable=[fold_gate]"], inspect) == 0
    assert "fold_gate" not in rows(capsys.readouterr().out)


def test_stop_after_is_for_inspection(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["+model=tiny", "compiler.stop_after=fuse_norms"], inspect) == 0
    assert list(rows(capsys.readouterr().out))[-1] == "fuse_norms"
    assert main(["+model=tiny", "compiler.stop_after=fuse_normz"], inspect) == 2
    error = capsys.readouterr().err
    assert "fuse_normz" in error and "fuse_norms" in error
    assert "Traceback" not in error


def test_it_says_how_long_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["+model=tiny"], inspect) == 0
    assert re.search(r"compiled: trace \d+\.\d s, prefill .* s, decode", capsys.readouterr().out)


def test_no_kernel_package_is_needed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it says what a GPU would run if they were there."""
    for module in ("minivllm.ops.op", "minivllm.inspect"):
        monkeypatch.setattr(f"{module}.is_importable", lambda package: False)
    for package in ("fla", "flash_attn", "triton"):
        monkeypatch.setitem(sys.modules, package, None)  # importing it is an error
    assert main(["+model=tiny"], inspect) == 0
    text = capsys.readouterr().out.partition("\non cuda, ")[2]
    chosen = dict(re.findall(r"^\| (\w+) \| [a-z0-9, ]+ \| (\w+) \|", text, re.MULTILINE))
    assert chosen["paged_attention_prefill"] == "triton"
    assert chosen["fused_gated_delta_rule_prefill_slots"] == "triton"
    assert chosen["linear"] == "triton" and "attention" not in chosen
    assert text.count("needs package: not installed here") == len(chosen) - 1  # the heading


def test_an_implementation_that_is_forced(capsys: pytest.CaptureFixture[str]) -> None:
    forced = "+compiler.implementations.linear"
    assert main(["+model=tiny", f"{forced}=torch"], inspect) == 0
    assert re.search(r"^\| linear \| decode \d+ \| torch \|  \|$", capsys.readouterr().out, re.M)
    assert main(["+model=tiny", f"{forced}=fla"], inspect) == 2
    error = capsys.readouterr().err
    assert "linear='fla'" in error and "torch, triton" in error


def test_time_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["+model=tiny"], inspect) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    found = re.fullmatch(r"process: (\d+\.\d) s, peak memory ([\d,]+) MB", last)
    assert found and float(found[1]) > 0
    assert 100 < int(found[2].replace(",", "")) < 20_000
