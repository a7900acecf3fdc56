"""What the benchmarks share: their command line, records and tables.

    sys.exit(command_line(__doc__, Options, action))
    python bench/NAME.py +model=tiny runtime.device=cpu bench.repeats=3 bench.out=run.json
    python bench/NAME.py --compare before.json after.json

Overrides are those of `minivllm.run`; a benchmark's own options are its group `bench.*`. A record
is one JSON object: `environment`, `benchmark`, `settings` (what two runs must share to be
compared), `results` (row, column, median) and `spread` (row, column, relative spread; null where
there is one sample), and what else a benchmark has to say. The last line of standard output is
`benchmark`, `model` and `results` as one line of JSON.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from bench.compare import compare_files
from bench.environment import cpu_name, environment
from bench.samples import Samples
from minivllm import presets
from minivllm.config import EngineConfig, OptionGroup, option
from minivllm.errors import UserError
from minivllm.overrides import is_multirun, quote_non_ascii
from minivllm.run import USER_FAULT, engine_config
from minivllm.run import main as run_main

OWN = re.compile(r"\+{0,2}bench\.(\w+)=(.*)", re.DOTALL)
# options that say what is measured and how often, not of what
NOT_WORKLOAD = ("out", "git_sha", "rows", "workloads", "rounds", "repeats", "plot", "ablation",
                "starts", "first_token_of")  # fmt: skip


@dataclass(frozen=True)
class BenchOptions(OptionGroup):
    """Options of every benchmark.

    Attributes:
        seed: of the random prompts.
        out: a JSON file for the record; None: none is written.
        git_sha: of the code that runs, where git cannot say.
    """

    group: ClassVar[str] = "bench"

    seed: int = option(0, at_least=0)
    out: str | None = option(None)
    git_sha: str | None = option(None)


@dataclass(frozen=True)
class Run:
    """One invocation: what it was asked for, and how.

    Attributes:
        config: of the engine.
        options: the benchmark's own.
        arguments: the command line, for the record and for child processes.
    """

    config: EngineConfig
    options: Any
    arguments: tuple[str, ...]

    @property
    def command(self) -> str:
        """As it was typed."""
        return shlex.join(["python", sys.argv[0], *self.arguments])


def command_line(
    document: str | None,
    options: type[BenchOptions],
    action: Callable[[Run], None],
    argv: Sequence[str] | None = None,
) -> int:
    """Run a benchmark's command line; returns its exit code as `minivllm.run.main`.

    Args:
        document: its `--help`, above the options.
        action: measures; called with the checked options.
        argv: None: the process's own.
    """
    arguments = tuple(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(f"{(document or '').strip()}\n\n{_help(options)}")
        return 0
    try:
        if "--compare" in arguments:
            compare_files(_two_files(arguments))
            return 0
        if is_multirun(arguments):
            raise UserError("-m: a benchmark is one run; start it once for each combination")
        own = options.from_mapping(_own_values(options, arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return USER_FAULT

    def job(settings: dict[str, Any]) -> None:
        _check_unused(settings)
        _check_writable(own)
        action(Run(engine_config(settings), own, arguments))

    return run_main([text for text in arguments if not OWN.fullmatch(text)], job)


def write_record(run: Run, settings: Mapping[str, Any], samples: Samples, **more: Any) -> None:
    """Write `bench.out`, and print the line of JSON.

    Args:
        settings: what two runs must share to be compared, beside the workload; its `benchmark`
            names the script, its `model` the model.
        more: further parts of the record.
    """
    options: BenchOptions = run.options
    workload = {
        f.name: getattr(options, f.name)
        for f in dataclasses.fields(options)
        if f.name not in NOT_WORKLOAD
    }
    record = {
        "environment": environment(options.git_sha, run.command),
        "benchmark": settings["benchmark"],
        "settings": {**settings, "workload": workload},
        "results": samples.results,
        "spread": samples.spread,
        **more,
    }
    if options.out is not None:
        Path(options.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"written: {options.out}")
    short = {name: settings[name] for name in ("benchmark", "model")}
    print(json.dumps(short | {"results": samples.results}), flush=True)


def machine(device: torch.device) -> str:
    """What ran it: the GPU's name, or the CPU's and the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Markdown: the first column to the left, numbers to the right."""
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(map(shown, row)) + " |" for row in rows)])


def shown(value: Any) -> str:
    """A number in about three digits; nothing for None."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    if 0 < abs(value) < 0.001:
        return f"{value:.1e}"
    digits = 3 if abs(value) < 1 else max(0, 3 - len(str(int(abs(value)))))
    return f"{value:,.{digits}f}"


def refuse_unused(group: str, options: OptionGroup, used: Sequence[str], reason: str) -> None:
    """Raises UserError for an option that was set and that nothing here reads."""
    for field in dataclasses.fields(options):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        value = getattr(options, field.name)
        if field.name not in used and value != default:
            raise UserError(f"{group}.{field.name}={value}: {reason}; of {group} it reads "
                            + (", ".join(used) or "nothing"))  # fmt: skip


def _own_values(options: type[BenchOptions], arguments: Sequence[str]) -> dict[str, Any]:
    """The values of `bench.*`, read by Hydra's grammar."""
    texts = [f.name for f in dataclasses.fields(options) if str(f.type).startswith("str")]
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    values: dict[str, Any] = {}
    for text in arguments:
        if (own := OWN.fullmatch(text)) is None:
            continue
        try:
            parsed = OverridesParser.create().parse_override(quote_non_ascii(text.lstrip("+")))
        except OverrideParseException:
            parsed = None
        if parsed is None or parsed.is_sweep_override():
            raise UserError(f"cannot read {text!r}; a list is written [a,b], a text with blanks "
                            "or commas in quotes inside those of the shell")  # fmt: skip
        if own[1] in values:
            raise UserError(f"bench.{own[1]}: given more than once")
        value = _plain(parsed.value())
        if own[1] in texts and isinstance(value, (int, float)):  # a commit of digits alone
            value = own[2]
        values[own[1]] = value
    return values


def _plain(value: Any) -> Any:
    """Hydra's quoted strings as strings."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.text if hasattr(value, "text") else value


def _check_unused(settings: Mapping[str, Any]) -> None:
    """Raises UserError for prompts and sampling parameters, which a benchmark chooses itself."""
    for key, default in presets.read("config").items():
        if settings.get(key, default) != default and key not in ("defaults", "hydra"):
            raise UserError(f"{key}={settings[key]}: a benchmark makes its own prompts")
    for key, default in presets.read("sampling/default").items():
        value = settings.get("sampling", {}).get(key, default)
        if value != default:
            raise UserError(f"sampling.{key}={value}: a benchmark chooses how it samples; "
                            "--help lists its options")  # fmt: skip


def _check_writable(options: BenchOptions) -> None:
    """Raises UserError before anything is measured that could not be kept."""
    if options.out is None:
        return
    out = Path(options.out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.open("a", encoding="utf-8").close()
    except OSError as error:
        raise UserError(f"bench.out={out}: {error.strerror}") from None


def _two_files(arguments: Sequence[str]) -> tuple[Path, Path]:
    if len(arguments) != 3 or arguments[0] != "--compare":
        raise UserError("--compare takes two records and nothing else: --compare a.json b.json")
    return Path(arguments[1]), Path(arguments[2])


def _help(options: type[BenchOptions]) -> str:
    lines = [
        "Options of the model, the compiler and the runtime are those of minivllm.run. bench.*:"
    ]
    width = max(len(field.name) for field in dataclasses.fields(options))
    for field in dataclasses.fields(options):
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        lines.append(f"  bench.{field.name:{width}}  {json.dumps(default).replace(' ', '')}")
    return "\n".join(lines)
