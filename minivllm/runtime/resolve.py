"""What the options leave open, decided for this machine and this checkpoint.

Owns every `auto` and where a model's files are. Does not own loading them (`build`).

    folder, config = find_model(options.model)
    device = resolve_device("auto"); dtype = resolve_dtype("auto", config, device)
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from pathlib import Path

import torch

from minivllm.config import ModelOptions, RuntimeOptions
from minivllm.errors import UserError
from minivllm.model.config import MiniQwenConfig
from minivllm.model.weights import load_config, parameter_shapes, resolve_model
from minivllm.runtime.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

TORCH_THREADS = torch.get_num_threads()  # before any engine sets another number
SMALL_MODEL = 2**26  # weights, below which an op is too short to be shared among threads


def resolve_device(name: str) -> torch.device:
    """`auto`: CUDA if there is one, else CPU; a CUDA device that is not there is a UserError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise UserError(
                f"runtime.device={name!r}: this machine has {count} CUDA devices; choose auto, "
                + ", ".join(["cpu", *(f"cuda:{i}" for i in range(count))])
            )
    return device


def resolve_dtype(name: str, config: MiniQwenConfig, device: torch.device) -> torch.dtype:
    """`auto`: the checkpoint's dtype on CUDA (bfloat16 if it says none), float32 on CPU."""
    if name == "auto":
        name = (config.dtype or "bfloat16") if device.type == "cuda" else "float32"
    return getattr(torch, name)


def resolve_state_dtype(options: RuntimeOptions, config: MiniQwenConfig) -> torch.dtype:
    """`auto`: what the checkpoint asks for (`mamba_ssm_dtype`), else float32."""
    name = options.state_dtype
    return getattr(torch, (config.mamba_ssm_dtype or "float32") if name == "auto" else name)


def use_no_cublas_workspace() -> None:
    """Have cuBLAS do without a workspace in this process and its children; before any product.

    With one it shares out the tiles of large products by a counter, which a memset sets to zero
    before each: a node more in a graph, 4 us of a prefill and 2 us of its launch. Torch reads the
    variable at its first product; who has set it before decides.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":0:0")


def resolve_num_threads(options: RuntimeOptions, config: MiniQwenConfig) -> int:
    """`None`: one thread for a small model, whose threads would wait longer than they work."""
    if options.num_threads is not None:
        return options.num_threads
    weights = sum(math.prod(shape) for shape in parameter_shapes(config).values())
    return 1 if weights < SMALL_MODEL else TORCH_THREADS


def find_model(options: ModelOptions) -> tuple[Path | None, MiniQwenConfig]:
    """The checkpoint's folder, if the options name one that counts, and the architecture.

    Raises:
        UserError: there is no such folder or hub id, or its config is of another architecture.
    """
    folder = _folder(options)
    return folder, _architecture(options, folder)


def _folder(options: ModelOptions) -> Path | None:
    """The checkpoint's folder; None for dummy weights whose shape the options tell."""
    if options.path is None:
        return None
    dummy = options.load_format == "dummy"
    local = options.path.startswith(("/", ".", "~")) or Path(options.path).is_dir()
    if dummy and options.architecture and not local:
        return None  # a preset's hub id: its shape stands in the options
    return resolve_model(options.path, options.revision, weights=not dummy)


def _architecture(options: ModelOptions, folder: Path | None) -> MiniQwenConfig:
    if folder is not None:
        config = load_config(folder)
        if options.architecture is not None:
            asked = MiniQwenConfig.from_hf(options.architecture)
            differing = [
                f.name
                for f in dataclasses.fields(config)
                if getattr(config, f.name) != getattr(asked, f.name)
            ]
            if differing:
                logger.warning(
                    "model.architecture is not used: the checkpoint's config.json tells the shape, "
                    "and differs in %s",
                    ", ".join(differing),
                )
        return config
    assert options.architecture is not None, "checked by ModelOptions"
    return MiniQwenConfig.from_hf(options.architecture)


def find_tokenizer(options: ModelOptions, folder: Path | None) -> Tokenizer | None:
    """The model's tokenizer; None where it is skipped, or dummy weights come without one.

    Raises:
        UserError: it is missing or unreadable.
    """
    if options.skip_tokenizer_init:
        return None
    if options.tokenizer is not None:
        return load_tokenizer(options.tokenizer)
    if folder is None or (
        options.load_format == "dummy" and not (folder / "tokenizer.json").is_file()
    ):
        return None
    return load_tokenizer(folder, options.revision)
