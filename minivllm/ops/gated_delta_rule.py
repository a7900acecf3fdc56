"""The gated delta rule: linear attention with a decaying, error-correcting state.

Owns the three forms of one operation: a whole sequence (the plain model), packed sequences with
state (prefill, by chunks), one token a sequence with state (decode). Does not own where states
live.

    o = torch.ops.minivllm.gated_delta_rule(q, k, v, g, beta)

Shapes: T tokens, N sequences, HK key heads, HV value heads (a multiple of HK; value head h reads
key head h // (HV // HK)), K and V head dims. A state is `[HV, V, K]` (V first), float32 unless
the pool says otherwise. For each token and value head (Yang et al., Gated Delta Networks, 2024):

    S = exp(g) * S;   S = S + beta * (v - S k) k^T;   o = S (q / sqrt(K))

q and k come L2-normalised; g is a log decay in float32; everything is computed in float32 and o
is cast to v's dtype.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from minivllm.ops import fla
from minivllm.ops.chunks import CHUNK_SIZE, chunk_metadata
from minivllm.ops.op import HALF_DTYPES, Implementation, define_op


def _expand_heads(x: Tensor, heads: int) -> Tensor:
    """`[..., HK, K]` to `[..., HV, K]` in float32: each key head serves a run of value heads."""
    return x.float().repeat_interleave(heads // x.shape[-2], dim=-2)


def define_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
) -> tuple[Tensor, Tensor]:
    """The packed form, token by token.

    Args:
        q, k: `[T, HK, K]`.
        v: `[T, HV, V]`.
        g, beta: `[T, HV]`; g float32.
        initial_state: `[N, HV, V, K]`.
        cu_seqlens: `[N + 1]`, int32: where each sequence starts; the last entry is T.
        chunk_indices: `[chunks, 2]`, int32 (sequence, chunk of 64 in it), which kernels need; rows
            behind the last chunk's may name chunks past their sequence's end
            (`chunked_delta_rule`).

    Returns:
        o `[T, HV, V]` in v's dtype, and the states after the last token, in initial_state's.
    """
    heads = v.shape[1]
    q, k = _expand_heads(q, heads) * q.shape[-1] ** -0.5, _expand_heads(k, heads)
    v32, decay, beta = v.float(), g.float().exp(), beta.float()
    o = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    final_state = initial_state.new_empty(initial_state.shape)
    bounds = cu_seqlens.tolist()
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        state = initial_state[n].float()
        for t in range(start, end):
            state = state * decay[t, :, None, None]
            error = v32[t] - (state * k[t, :, None, :]).sum(-1)
            state = state + (beta[t, :, None] * error)[:, :, None] * k[t, :, None, :]
            o[t] = (state * q[t, :, None, :]).sum(-1)
        final_state[n] = state
    return o.to(v.dtype), final_state


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One sequence by chunks of 64: the tokens of a chunk are solved together.

    Within a chunk the corrections u obey a unit lower-triangular system (the WY form of the
    delta rule), so a chunk costs a few matrix products and one triangular solve instead of 64
    dependent steps. Takes and returns float32; state is `[HV, V, K]`.
    """
    tokens, heads = v.shape[:2]
    size = CHUNK_SIZE
    pad = -tokens % size

    def by_chunk(x: Tensor) -> Tensor:
        x = torch.cat([x, x.new_zeros(pad, *x.shape[1:])]) if pad else x
        return x.unflatten(0, (-1, size)).transpose(1, 2)  # [chunks, HV, size, ...]

    q, k, v, g, beta = (
        by_chunk(x)
        for x in (
            _expand_heads(q, heads) * q.shape[-1] ** -0.5,
            _expand_heads(k, heads),
            v.float(),
            g.float(),
            beta.float(),
        )
    )
    # summed in float64: a small decay is the difference of two sums that large ones have made large
    log_decay = g.double().cumsum(-1)
    causal = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
    between = (log_decay[..., :, None] - log_decay[..., None, :]).masked_fill(~causal, -torch.inf)
    between = between.float().exp()
    k_beta = k * beta[..., None]
    system = (k_beta @ k.transpose(-1, -2)) * between
    from_start = log_decay.float().exp()[..., None]
    solved = torch.linalg.solve_triangular(
        system, torch.cat([v * beta[..., None], k_beta * from_start], -1), upper=False,
        unitriangular=True,
    )  # fmt: skip
    u, k_cumulative = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    attention = (q @ k.transpose(-1, -2)) * between
    q = q * from_start
    k_to_end = k * between[..., -1, :, None]
    chunk_decay = from_start[..., -1:, :]
    outputs = []
    state = state.transpose(-1, -2)  # [HV, K, V]
    for c in range(v.shape[0]):
        correction = u[c] - k_cumulative[c] @ state
        outputs.append(q[c] @ state + attention[c] @ correction)
        state = state * chunk_decay[c] + k_to_end[c].transpose(-1, -2) @ correction
    o = torch.stack(outputs).transpose(1, 2).flatten(0, 1)[:tokens]
    return o, state.transpose(-1, -2)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
) -> tuple[Tensor, Tensor]:
    """Sequence by sequence, each by chunks; the host reads `cu_seqlens`."""
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    final_state = initial_state.clone(memory_format=torch.contiguous_format)
    bounds = cu_seqlens.tolist()
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        if end > start:
            rows = slice(start, end)
            o[rows], final_state[n] = _chunked(
                q[rows], k[rows], v[rows], g[rows], beta[rows], initial_state[n].float()
            )
    return o, final_state


def _varlen_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
) -> tuple[Tensor, Tensor]:
    o, final_state = fla.chunk_gated_delta_rule()(
        *(x[None] for x in (q, k, v, g, beta)),
        initial_state=initial_state,
        output_final_state=True,
        state_v_first=True,
        cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices,
    )
    return o[0], final_state.to(initial_state.dtype)


def _varlen_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), initial_state.new_empty(initial_state.shape)


def define_decode(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One more token for each sequence.

    Args:
        q, k: `[N, HK, K]`.
        v: `[N, HV, V]`.
        g, beta: `[N, HV]`; g float32.
        state: `[N, HV, V, K]`; not changed.

    Returns:
        o `[N, HV, V]` in v's dtype, and the new states in state's dtype.
    """
    heads = v.shape[1]
    q, k = _expand_heads(q, heads) * q.shape[-1] ** -0.5, _expand_heads(k, heads)
    new_state = state.float() * g.float().exp()[..., None, None]
    error = v.float() - (new_state @ k[..., None])[..., 0]
    new_state = new_state + (beta.float()[..., None] * error)[..., None] * k[..., None, :]
    o = (new_state @ q[..., None])[..., 0]
    return o.to(v.dtype), new_state.to(state.dtype).contiguous()


def _decode_fla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    o, new_state = fla.fused_recurrent_gated_delta_rule()(
        *(x[:, None] for x in (q, k, v, g)),
        beta=beta[:, None],
        initial_state=state,
        output_final_state=True,
        state_v_first=True,
    )
    return o[:, 0], new_state.to(state.dtype)


def _decode_fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), state.new_empty(state.shape)


def _empty_state(k: Tensor, v: Tensor) -> Tensor:
    return k.new_zeros(1, v.shape[1], v.shape[2], k.shape[2], dtype=torch.float32)


def define_sequence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """A whole sequence from an empty state, token by token; shapes as in `define_varlen`."""
    cu_seqlens, chunk_indices = chunk_metadata([v.shape[0]])
    return define_varlen(q, k, v, g, beta, _empty_state(k, v), cu_seqlens, chunk_indices)[0]


def _sequence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """A whole sequence from an empty state, by chunks."""
    return _chunked(q, k, v, g, beta, _empty_state(k, v)[0])[0].to(v.dtype).contiguous()


def _sequence_fake(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return v.new_empty(v.shape)


def _example_rows(
    generator: torch.Generator, dtype: torch.dtype, rows: int, key_heads: int, value_heads: int
) -> tuple[Tensor, ...]:
    """q, k, v, g, beta as the model makes them: slices of one row, unit q and k, decays < 1."""
    key_dim, value_dim = 16, 24
    widths = [key_heads * key_dim, key_heads * key_dim, value_heads * value_dim]
    mixed = torch.randn(rows, sum(widths), generator=generator)
    q, k, v = mixed.split(widths, dim=-1)
    q, k = (torch.nn.functional.normalize(x.unflatten(-1, (key_heads, -1)), dim=-1) for x in (q, k))
    mixed = torch.cat([q.flatten(1), k.flatten(1), v], dim=-1).to(dtype)
    q, k, v = mixed.split(widths, dim=-1)
    g = -torch.rand(rows, value_heads, generator=generator).exp().sub(1)
    beta = torch.rand(rows, value_heads, generator=generator).to(dtype)
    return (
        q.unflatten(-1, (key_heads, -1)),
        k.unflatten(-1, (key_heads, -1)),
        v.unflatten(-1, (value_heads, -1)),
        g,
        beta,
    )


def _example_state(generator: torch.Generator, sequences: int, value_heads: int) -> Tensor:
    return torch.randn(sequences, value_heads, 24, 16, generator=generator)


def _sequence_examples(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    return [_example_rows(generator, dtype, t, hk, 4) for t, hk in ((1, 4), (63, 2), (130, 4))]


def _varlen_examples(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    return [
        (
            *_example_rows(generator, dtype, sum(lengths), 2, 4),
            _example_state(generator, len(lengths), 4),
            *chunk_metadata(lengths),
        )
        for lengths in ((1,), (64, 3), (5, 0, 129, 1))
    ]


def _decode_examples(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    return [
        (*_example_rows(generator, dtype, n, 2, 4), _example_state(generator, n, 4)) for n in (1, 5)
    ]


# float32: sums over up to 64 tokens and the head dim in another order. Half precision: FLA keeps
# the products of a chunk in the input's dtype, a few roundings deep.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}

GATED_DELTA_RULE = define_op(
    "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta) -> Tensor",
    definition=define_sequence,
    fake=_sequence_fake,
    implementations=(Implementation("torch", _sequence),),
    examples=_sequence_examples,
    tolerance=_TOLERANCE,
)

GATED_DELTA_RULE_PREFILL = define_op(
    "gated_delta_rule_prefill(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, "
    "Tensor initial_state, Tensor cu_seqlens, Tensor chunk_indices) -> (Tensor, Tensor)",
    definition=define_varlen,
    fake=_varlen_fake,
    implementations=(
        Implementation("torch", _varlen, capturable=False),
        Implementation("fla", _varlen_fla, ("cuda",), HALF_DTYPES, "fla", capturable=False),
    ),
    examples=_varlen_examples,
    tolerance=_TOLERANCE,
)

GATED_DELTA_RULE_DECODE = define_op(
    "gated_delta_rule_decode(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state) "
    "-> (Tensor, Tensor)",
    definition=define_decode,
    fake=_decode_fake,
    implementations=(
        Implementation("torch", define_decode),
        Implementation("fla", _decode_fla, ("cuda",), HALF_DTYPES, "fla", capturable=False),
    ),
    examples=_decode_examples,
    tolerance=_TOLERANCE,
)
