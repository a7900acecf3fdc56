"""From a checkpoint to the plain model's `state_dict`.

Owns the names and shapes of MiniQwen's parameters, where each is found in a checkpoint, and the
reading of the tensors. Files and headers are `checkpoint`'s, folders and downloads `source`'s,
random weights `dummy`'s; their entry points are offered here too, since loading is one act.

    load_weights(folder, parameter_shapes(load_config(folder)), torch.bfloat16, "cuda")

Shapes: C channels of a convolution, W its taps.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from minivllm.errors import UserError
from minivllm.model.checkpoint import (
    StoredTensor,
    abbreviate,
    load_config,
    open_safetensors,
    read_ahead,
    stored_tensors,
)
from minivllm.model.config import MiniQwenConfig
from minivllm.model.dummy import dummy_weights
from minivllm.model.source import resolve_model

__all__ = [
    "dummy_weights",
    "load_config",
    "load_weights",
    "parameter_shapes",
    "read_ahead",
    "resolve_model",
]

logger = logging.getLogger(__name__)

_DTYPES = ("F64", "F32", "F16", "BF16")
_ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
# Leading segments of the weights that a text model leaves out.
_SKIPPED = {
    "vision": (("visual",), ("model", "visual")),
    "MTP": (("mtp",), ("model", "mtp")),
}


def parameter_shapes(config: MiniQwenConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of MiniQwen, in the model's order.

    A linear weight is [out, in]; `q_proj` gives a query and a gate per head. `lm_head.weight`
    is there only if the head is not tied.
    """
    c = config
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    for index, layer_type in enumerate(c.layer_types):
        full = layer_type == "full_attention"
        layer = {
            "input_layernorm.weight": (c.hidden_size,),
            **{
                f"mixer.{name}": shape
                for name, shape in (_attention_shapes(c) if full else _linear_shapes(c)).items()
            },
            "post_attention_layernorm.weight": (c.hidden_size,),
            "mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size),
            "mlp.up_proj.weight": (c.intermediate_size, c.hidden_size),
            "mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
        }
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["norm.weight"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes


def _attention_shapes(c: MiniQwenConfig) -> dict[str, tuple[int, ...]]:
    query, key = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    widths = {
        "q_proj": (2 * query, c.hidden_size),
        "k_proj": (key, c.hidden_size),
        "v_proj": (key, c.hidden_size),
        "o_proj": (c.hidden_size, query),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in widths.items():
        shapes[f"{name}.weight"] = shape
        if c.attention_bias:
            shapes[f"{name}.bias"] = shape[:1]
    return shapes | {"q_norm.weight": (c.head_dim,), "k_norm.weight": (c.head_dim,)}


def _linear_shapes(c: MiniQwenConfig) -> dict[str, tuple[int, ...]]:
    return {
        "A_log": (c.linear_num_value_heads,),
        "dt_bias": (c.linear_num_value_heads,),
        "in_proj_qkv.weight": (c.conv_dim, c.hidden_size),
        "in_proj_z.weight": (c.value_dim, c.hidden_size),
        "in_proj_b.weight": (c.linear_num_value_heads, c.hidden_size),
        "in_proj_a.weight": (c.linear_num_value_heads, c.hidden_size),
        "conv1d.weight": (c.conv_dim, c.linear_conv_kernel_dim),
        "norm.weight": (c.linear_value_head_dim,),
        "out_proj.weight": (c.hidden_size, c.value_dim),
    }


def load_weights(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device | str,
    progress: bool = True,
    targets: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The parameters named in `shapes`, read from `folder`, in `dtype` on `device`.

    A parameter named in `targets` is read into that tensor (rows of a merged weight, say) and no
    other is made for it. All are cast as transformers' `from_pretrained(dtype=…)` does; one stored
    tensor at a time is held beside them, and one file at a time is mapped. `progress` shows a bar
    on stderr where that is a terminal. Vision and MTP weights are skipped and counted in the log.
    Raises UserError for a broken checkpoint, and for one that does not fit `shapes`, listing all
    that is missing, unexpected, or of another shape or an unsupported dtype.
    """
    stored = stored_tensors(folder)
    names = _disk_names(shapes, stored)
    unused = [name for name in stored if name not in names]
    skipped = {kind: [n for n in unused if _starts(n, heads)] for kind, heads in _SKIPPED.items()}
    _check_fit(folder, shapes, stored, names, set(unused).difference(*skipped.values()))
    if any(skipped.values()):
        counts = ", ".join(f"{len(found)} {kind}" for kind, found in skipped.items() if found)
        logger.info("skipped weights that a text model leaves out: %s", counts)

    by_file: defaultdict[Path, list[str]] = defaultdict(list)
    for name in names:
        by_file[stored[name].file].append(name)
    loaded: dict[str, Tensor] = {}
    total = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    with tqdm(
        total=total, desc="weights", unit="B", unit_scale=True, disable=None if progress else True
    ) as bar:
        for file, file_names in by_file.items():
            with open_safetensors(file) as handle:
                for name in file_names:
                    plain = names[name]
                    target = (targets or {}).get(plain)
                    if target is None:
                        target = torch.empty(shapes[plain], dtype=dtype, device=device)
                    loaded[plain] = target.copy_(handle.get_tensor(name).view(shapes[plain]))
                    bar.update(target.nbytes)
    return {plain: loaded[plain] for plain in shapes}


def _disk_names(shapes: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    """Name on disk to name in the plain model, in the layout (text-only, composite) of `stored`.

    Whole names are compared, so that no tensor is taken for one with a similar name.
    """
    composite = any(_starts(name, (("model", "language_model"),)) for name in stored)
    prefix = "model.language_model." if composite else "model."
    names = {}
    for plain in shapes:
        parts = plain.split(".")
        if parts[0] == "layers" and parts[2] == "mixer":
            parts[2] = "self_attn" if parts[3] in _ATTENTION_MODULES else "linear_attn"
        names[plain if parts[0] == "lm_head" else prefix + ".".join(parts)] = plain
    return names


def _starts(name: str, heads: Iterable[tuple[str, ...]]) -> bool:
    parts = tuple(name.split("."))
    return any(parts[: len(head)] == head for head in heads)


def _check_fit(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, StoredTensor],
    names: Mapping[str, str],
    unexpected: Iterable[str],
) -> None:
    """Raise UserError with everything in which `stored` differs from `shapes`."""
    wrong_shape, wrong_dtype = [], []
    for name, plain in names.items():
        if name not in stored:
            continue
        shape = wanted = shapes[plain]
        if plain.split(".")[-2:] == ["conv1d", "weight"]:  # a depthwise Conv1d's [C, 1, W]
            wanted = (shape[0], 1, shape[1])
        if stored[name].shape != wanted:
            wrong_shape.append(f"{name} {list(stored[name].shape)} instead of {list(wanted)}")
        if stored[name].dtype not in _DTYPES:
            wrong_dtype.append(f"{name} {stored[name].dtype}")
    problems = {
        "missing": [name for name in names if name not in stored],
        "unexpected": sorted(unexpected),
        "wrong shape": wrong_shape,
        f"dtype not supported (choices: {', '.join(_DTYPES)})": wrong_dtype,
    }
    lines = [
        f"  {what} ({len(which)}): {abbreviate(which)}" for what, which in problems.items() if which
    ]
    if lines:
        raise UserError("\n".join([f"the weights in {folder} do not fit its config:", *lines]))
