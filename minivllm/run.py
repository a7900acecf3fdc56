"""Generates text from the command line: Hydra config in, streamed text and a summary line out.

Owns composition (this is the package's only importer of Hydra) and exit codes: 0, or 2 with one
message on standard error for what a user can cause; other exceptions keep their traceback. Does
not own option checks (`config`, `SamplingParams`), printing (`console`), conversations (`chat`)
nor generation (`LLM`).

    python -m minivllm.run +model=tiny prompt="def main"
    python -m minivllm.run +model=tiny chat=true
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from minivllm import chat, console, overrides
from minivllm.config import EngineConfig
from minivllm.errors import UserError
from minivllm.presets import conf_dir
from minivllm.prompts import read_prompts

if TYPE_CHECKING:
    from minivllm.runtime.llm import LLM

BROKEN_PIPE = 1
USER_FAULT = 2
INTERRUPTED = 130


def main(
    argv: Sequence[str] | None = None, action: Callable[[dict[str, Any]], None] | None = None
) -> int:
    """Runs a command line (default: the process's own) and returns its exit code.

    Args:
        action: what a job does with its composed config; None: `run`.

    Returns:
        0; 2 after a fault of the user, in any job of a multirun; 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    codes: list[int] = []  # one a job; empty as long as the command line itself is being read

    def job(cfg: DictConfig) -> None:
        codes.append(0)
        try:
            (action or run)(_plain(cfg))
        except UserError as error:
            codes[-1] = _fault(str(error))
        except BrokenPipeError:  # whoever read the output, such as `head`, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            codes[-1] = BROKEN_PIPE

    app = hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(job)
    try:
        with _command_line(arguments):
            app()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if codes:
            raise
        unreadable = error.override if isinstance(error, OverrideParseException) else None
        return _fault(overrides.explain(str(error), arguments, unreadable))
    except KeyboardInterrupt:
        return INTERRUPTED
    return max(codes, default=0)


def run(settings: dict[str, Any]) -> None:
    """One job: checks everything that needs no model, then loads the model and generates.

    Args:
        settings: the composed config, plain: the four groups and the keys of prompts and chats.

    Raises:
        UserError: something wrong in them, in the prompts or in the model's files.
    """
    from minivllm.runtime.sampling_params import SamplingParams

    config = engine_config(settings)
    sampling_params = SamplingParams.from_mapping(settings.get("sampling", {}))
    conversation = chat.read_options(settings, config, sampling_params)
    prompts = []
    if conversation is None:
        prompts = read_prompts(
            prompt=settings.get("prompt"),
            prompts=settings.get("prompts"),
            prompt_file=settings.get("prompt_file"),
            default=settings.get("default_prompt"),
        )
    llm = build_llm(config)
    try:
        if conversation is not None:
            chat.run_chat(llm, sampling_params, conversation)
        else:
            outputs = console.print_stream(llm, prompts, sampling_params)
            print(console.summary(outputs, llm, config.compiler.mode), flush=True)
    finally:
        llm.close()


def engine_config(settings: dict[str, Any]) -> EngineConfig:
    """The options of a composed config.

    Raises:
        UserError: no model, an unknown key, a wrong type or a value out of range.
    """
    overrides.check_top_level(settings)
    if settings.get("model") is None:
        raise UserError(overrides.no_model())
    return EngineConfig.from_mapping(
        {group: settings[group] for group in ("model", "compiler", "runtime") if group in settings}
    )


def build_llm(config: EngineConfig) -> LLM:
    """The engine; imported here so that `--help` and `--cfg job` need no torch."""
    from minivllm.runtime.llm import LLM

    return LLM.from_config(config)


def _plain(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain containers; in a multirun, first a line that tells the job."""
    console.tolerate_any_text()
    job = HydraConfig.get()
    if job.mode == RunMode.MULTIRUN:
        print(f"=== {' '.join(job.overrides.task)}", flush=True)
    try:
        settings = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(
            f"{str(error).splitlines()[0]}: ${{…}} inserts another key's value; to have it as it "
            "stands write \\${…}, or put the text in a file: prompt_file=FILE"
        ) from None
    assert isinstance(settings, dict)
    return {str(key): value for key, value in settings.items()}


def _fault(message: str) -> int:
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr, flush=True)
    return USER_FAULT


@contextmanager
def _command_line(arguments: Sequence[str]) -> Iterator[None]:
    """The process as Hydra should find it: `sys.argv`, exceptions left to us, no litter."""
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    with tempfile.TemporaryDirectory(prefix="minivllm-") as scratch:
        prepared = overrides.prepare(arguments)
        if overrides.is_multirun(arguments):  # Hydra writes a multirun.yaml; nobody asked for it
            prepared.append(f"hydra.sweep.dir='{scratch}'")
        sys.argv = [argv[0], *prepared]
        os.environ["HYDRA_FULL_ERROR"] = "1"
        try:
            yield
        finally:
            sys.argv = argv
            if full_error is None:
                del os.environ["HYDRA_FULL_ERROR"]
            else:
                os.environ["HYDRA_FULL_ERROR"] = full_error


if __name__ == "__main__":
    sys.exit(main())
