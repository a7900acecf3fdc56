"""Kernels of the tiny model's training: which ones it runs, and that they are right.

Owns the binding of FLA's kernels into transformers' Qwen3.5 and the checks against its torch code;
not the model, nor the training loop.

    bind_delta_rule("fla"); check_delta_rule("cuda")
    with fused_kernels(model): ...   # the convolution and the norms too

Shapes: B rows, T tokens a row, H key heads, HV value heads, K/V head dims, C chunk, N chunks,
M = B * N * HV independent chunks, D channels.
"""

import contextlib
import importlib
import inspect
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from tiny_corpus import UsageError
from torch.func import functional_call
from torch.nn import functional as F

NEEDS_GPU = "training needs the `train` extra and a CUDA GPU (or --device cpu, for a smoke test)"
TOLERANCE = 0.05  # rounding to bf16 gives about 0.005

# FLA's autotuners would compile and time 150 variants, one to two minutes on a slow host, and some
# again for every new batch size. One of FLA's own configurations each, for 64-wide heads on Hopper.
CONFIGURATIONS = {
    "fla.ops.utils.cumsum": {"chunk_local_cumsum_scalar_kernel": {"num_warps": 2}},
    "fla.modules.norm.l2norm": {
        "l2norm_fwd_kernel": {"BT": 32, "num_warps": 4},
        "l2norm_bwd_kernel": {"BT": 32, "num_warps": 4},
    },
    "fla.ops.gated_delta_rule.chunk_fwd": {
        "chunk_gated_delta_rule_fwd_kkt_solve_kernel": {"BK": 64, "num_warps": 2}
    },
    "fla.ops.gated_delta_rule.wy_fast": {
        "recompute_w_u_fwd_kernel": {"num_warps": 4, "num_stages": 2},
        "prepare_wy_repr_bwd_kernel": {"num_warps": 4, "num_stages": 2},
    },
    "fla.ops.common.chunk_delta_h": {
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": {
            "BV": 32,
            "num_warps": 4,
            "num_stages": 2,
        },
        "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": {
            "BV": 32,
            "num_warps": 4,
            "num_stages": 2,
        },
    },
    "fla.ops.common.chunk_o": {
        "chunk_fwd_kernel_o": {"BK": 64, "BV": 64, "num_warps": 4, "num_stages": 3},
        "chunk_bwd_kernel_dv_local": {"num_warps": 4, "num_stages": 2},
    },
    "fla.modules.causal_conv1d.ops": {
        "causal_conv1d_fwd_kernel": {"BD": 64, "num_warps": 4},
        "causal_conv1d_bwd_kernel": {"BD": 32, "num_warps": 4},
    },
    "fla.modules.norm.fused_norm_gate": {
        "layer_norm_gated_fwd_kernel": {"BT": 32, "num_warps": 4},
        "layer_norm_gated_bwd_kernel": {"BT": 64, "num_warps": 8},
    },
}


def skip_autotuning() -> None:
    """Leave each of FLA's autotuners one configuration, so that it has nothing to time."""
    for module, kernels in CONFIGURATIONS.items():
        for name, wanted in kernels.items():
            kernel = getattr(importlib.import_module(module), name)
            while not hasattr(kernel, "configs"):
                kernel = kernel.fn
            chosen = [c for c in kernel.configs if wanted.items() <= c.all_kwargs().items()]
            if not chosen:
                raise RuntimeError(f"{module}.{name} does not offer {wanted}")
            kernel.configs = chosen[:1]


# --- delta rule -------------------------------------------------------------------------------


def bind_delta_rule(choice: str) -> str:
    """Make the model use FLA's kernel or transformers' torch code; returns what it now calls.

    transformers binds FLA when its model file is imported and falls back to torch silently if that
    import fails, so the binding is checked and not trusted.
    """
    if choice == "fla":
        try:
            import fla  # noqa: F401  # before the model file: FLA imports transformers itself
        except ImportError as error:
            raise UsageError(NEEDS_GPU) from error
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    if choice == "torch":
        for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
            setattr(qwen, name, getattr(qwen, name).__wrapped__)
        return qwen.torch_chunk_gated_delta_rule.__module__
    bound = inspect.getclosurevars(qwen.torch_chunk_gated_delta_rule).nonlocals["implementation"]
    if not bound.__module__.startswith("fla."):
        raise RuntimeError(f"transformers bound {bound.__module__}, not FLA's delta rule")
    register_torch_backward()
    return bound.__module__


def register_torch_backward() -> None:
    """Give FLA one backward stage in torch, where Triton 3.4 to 3.7.0 miscompiles it on Hopper.

    FLA refuses to run its Triton kernel there (flash-linear-attention issue 640) and offers
    TileLang, which needs nvcc. The stage is local to a chunk: five batched matrix products.
    """
    from fla.backends import BaseBackend, register

    @register("common")
    class TorchChunkBackward(BaseBackend):
        backend_type = "torch_chunk_backward"
        priority = -1

        def chunk_bwd_dqkwg_verifier(self, *, q, cu_seqlens, chunk_size, state_v_first, **_):
            whole_chunks = cu_seqlens is None and q.shape[1] % chunk_size == 0
            return whole_chunks and not state_v_first, "only whole chunks, states [K, V]"

        def chunk_bwd_dqkwg(self, *, q, k, v, do, h, dh, w, g, dv, scale, chunk_size, **_):
            return chunk_backward(q, k, v, do, h, dh, w, g, dv, scale, chunk_size)


def chunk_backward(q, k, v, do, h, dh, w, g, dv, scale: float, chunk_size: int):
    """Gradients (dq, dk, dw, dg) of the chunk-local stage of the gated delta rule, in fp32.

    q, k [B, T, H, K]; v, do, dv [B, T, HV, V]; w [B, T, HV, K]; h, dh [B, N, HV, K, V], the states
    before each chunk and the gradients of the states after it; g [B, T, HV], the log2 of the decay
    accumulated within the chunk.
    """
    value_heads = v.shape[2]

    def chunks(x):  # [B, T, heads, D] -> [M, C, D]
        if x.shape[2] != value_heads:
            x = x.repeat_interleave(value_heads // x.shape[2], dim=2)
        x = x.unflatten(1, (-1, chunk_size)).transpose(2, 3)
        # Copied once here; a permuted operand is copied again by each product that reads it.
        return x.to(torch.float32, memory_format=torch.contiguous_format).flatten(0, 2)

    def tokens(x, like):  # the reverse, summed over the value heads that share a key head
        x = x.unflatten(0, (like.shape[0], -1, value_heads)).transpose(2, 3)
        if like.shape[2] != value_heads:
            x = x.unflatten(3, (like.shape[2], -1)).sum(4)
        return x.to(like.dtype, memory_format=torch.contiguous_format).flatten(1, 2)

    qc, kc, vc, doc, dvc = (chunks(x) for x in (q, k, v, do, dv))
    h, dh, decay = h.float().flatten(0, 2), dh.float().flatten(0, 2), chunks(g[..., None])
    last = decay[:, -1:]
    scaled = decay + math.log2(scale)
    future = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).triu(1)

    with tf32_products(q.device):
        ds = (scaled - decay.mT).masked_fill_(future, float("-inf")).exp2_()
        ds *= doc @ vc.mT
        dq = (doc @ h.mT).mul_(scaled.exp2()).baddbmm_(ds, kc)
        dk_state = (vc @ dh.mT).mul_((last - decay).exp2())
        dk = torch.baddbmm(dk_state, ds.mT, qc)
        dw = dvc @ h.mT
    dg = (dq * qc).addcmul_(dk, kc, value=-1).sum(-1)
    dg[:, -1] += (h * dh).sum((-1, -2)) * last[:, 0, 0].exp2() + (dk_state * kc).sum((-1, -2))
    dg = tokens(dg[..., None], g[..., None])[..., 0]
    return tokens(dq, q), tokens(dk, k), tokens(dw, w).neg_(), dg


@contextlib.contextmanager
def tf32_products(device: torch.device) -> Iterator[None]:
    """fp32 operands and results within, where FLA's backward restores the forward's autocast.

    TF32 is not for the whole program: it would round the rotary embedding's frequencies.
    """
    precision = torch.get_float32_matmul_precision()
    with torch.autocast(device.type, enabled=False):
        torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)


# --- convolution and norms --------------------------------------------------------------------


def fused_convolution(hidden_states, weight, bias=None, activation=None, **_):
    """transformers' `causal_conv1d_fn` by FLA's Triton kernel; hidden_states [B, D, T]."""
    from fla.modules.causal_conv1d import causal_conv1d

    # The model holds [B, T, D] and transposes for the reference; this undoes it without a copy.
    out, _ = causal_conv1d(hidden_states.mT, weight, bias, activation=activation)
    return out.mT


def fused_norm(module, hidden_states):
    """`Qwen3_5RMSNorm.forward` by torch's one kernel.

    It returns bf16 always: under autocast every reader would round to it, each on its own.
    """
    weight = 1.0 + module.weight
    out = F.rms_norm(hidden_states.float(), hidden_states.shape[-1:], weight, module.eps)
    return out.bfloat16()


def fused_gated_norm(module, hidden_states, gate):
    """`Qwen3_5RMSNormGated.forward` by FLA's Triton kernel."""
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    return rms_norm_gated(
        hidden_states, gate, module.weight, None, activation="swish", eps=module.variance_epsilon
    )


def fused_forwards() -> dict[type, Callable]:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    return {qwen.Qwen3_5RMSNorm: fused_norm, qwen.Qwen3_5RMSNormGated: fused_gated_norm}


@contextlib.contextmanager
def fused_kernels(model) -> Iterator[None]:
    """Within, `model` runs the fused convolution and norms; outside, transformers' own code."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    convolution, forwards = qwen.causal_conv1d_fn, fused_forwards()
    norms = [module for module in model.modules() if type(module) in forwards]
    try:
        qwen.causal_conv1d_fn = fused_convolution
        for module in norms:
            module.forward = partial(forwards[type(module)], module)
        yield
    finally:
        qwen.causal_conv1d_fn = convolution
        for module in norms:
            module.__dict__.pop("forward", None)


# --- checks -----------------------------------------------------------------------------------


def compare(name: str, bound: Callable, reference: Callable, inputs: dict) -> dict[str, float]:
    """Relative errors of `bound`'s output and gradients, under autocast as the training calls it,
    against `reference` in fp32.
    """

    def results(function, upcast):
        leaves = [(x.float() if upcast else x).detach().requires_grad_() for x in inputs.values()]
        cast = not upcast and leaves[0].is_cuda
        with torch.autocast(leaves[0].device.type, torch.bfloat16, enabled=cast):
            out = function(*leaves)
        generator = torch.Generator().manual_seed(1)
        cotangent = torch.randn(out.shape, generator=generator).to(out.device, out.dtype)
        return [out, *torch.autograd.grad(out, leaves, cotangent)]

    errors = {
        key: ((x.float() - y).norm() / y.norm()).item()
        for key, x, y in zip(
            ["o", *(f"d{key}" for key in inputs)],
            results(bound, False),
            results(reference, True),
            strict=True,
        )
    }
    if not max(errors.values()) < TOLERANCE:
        raise RuntimeError(f"the bound {name} is wrong, relative errors {errors}")
    return errors


def check_delta_rule(device: str, rows: int = 2, seq_len: int = 256) -> dict[str, float]:
    """Relative errors of the bound delta rule; at the training's shape, it compiles its kernels."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    bound = qwen.torch_chunk_gated_delta_rule
    draw = normals(device)
    shape = (rows, seq_len, 6)
    inputs = {key: draw(*shape, 64).bfloat16() for key in "qkv"}
    inputs |= {"g": -F.softplus(draw(*shape)), "beta": draw(*shape).sigmoid().bfloat16()}

    def output(function):
        def run(q, k, v, g, beta):
            return function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

        return run

    reference = getattr(bound, "__wrapped__", bound)
    return compare("delta rule", output(bound), output(reference), inputs)


def check_fused_kernels(device: str, rows: int = 2, seq_len: int = 256) -> dict[str, dict]:
    """Relative errors of the fused convolution and norms, by kernel."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    draw = normals(device)

    def convolution(function):
        def run(x, weight):  # x [B, T, D], as the model's projection leaves it
            return function(x.mT, weight, None, activation="silu").mT

        return run

    def norm(kind, dim, fused):
        module = kind(dim).to(device)
        if fused:
            module.forward = partial(fused_forwards()[kind], module)

        def run(weight, *arguments):
            return functional_call(module, {"weight": weight}, arguments)

        return run

    reference = getattr(qwen.causal_conv1d_fn, "__wrapped__", qwen.causal_conv1d_fn)
    errors = {
        "convolution": compare(
            "convolution",
            convolution(fused_convolution),
            convolution(reference),
            {"x": draw(rows, seq_len, 768).bfloat16(), "weight": draw(768, 4)},
        )
    }
    norms = {
        "norm": (qwen.Qwen3_5RMSNorm, {"weight": draw(192), "x": draw(rows, seq_len, 192)}),
        "gated norm": (
            qwen.Qwen3_5RMSNormGated,
            {"weight": draw(64)}
            | {key: draw(rows * seq_len * 6, 64).bfloat16() for key in ("x", "gate")},
        ),
    }
    for name, (kind, inputs) in norms.items():
        dim = len(inputs["weight"])
        bound, torch_code = norm(kind, dim, True), norm(kind, dim, False)
        errors[name] = compare(name, bound, torch_code, inputs)
    return errors


def normals(device: str) -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator).to(device)
