"""The order of the passes, and which of them a mode runs.

Owns the order, and where a user's own passes stand in it. Does not own how passes are run and
checked (runner.py).

    passes = select_passes("eager", "prefill")
"""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.compiler.pass_check import check_passes
from minivllm.compiler.passes.base import GraphPass
from minivllm.compiler.passes.canonicalize import Canonicalize
from minivllm.compiler.passes.decode_linears import DecodeLinears
from minivllm.compiler.passes.fold_gate import FoldGate
from minivllm.compiler.passes.fuse_conv_qk_norm import FuseConvQkNorm
from minivllm.compiler.passes.fuse_linear_epilogues import FuseLinearEpilogues
from minivllm.compiler.passes.fuse_linear_prologues import FuseLinearPrologues
from minivllm.compiler.passes.fuse_norms import FuseNorms
from minivllm.compiler.passes.fuse_output_gate import FuseOutputGate
from minivllm.compiler.passes.fuse_qk_norm_rope import FuseQkNormRope
from minivllm.compiler.passes.fuse_residual_add import FuseResidualAdd
from minivllm.compiler.passes.fuse_silu_mul import FuseSiluMul
from minivllm.compiler.passes.inplace_state import InplaceState
from minivllm.compiler.passes.keep_snapshots import KeepSnapshots
from minivllm.compiler.passes.lower_attention import LowerAttention
from minivllm.compiler.passes.lower_mixers import LowerMixers
from minivllm.compiler.passes.merge_linears import MergeLinears
from minivllm.compiler.passes.prefetch_states import PrefetchStates
from minivllm.compiler.passes.select_logits import SelectLogits
from minivllm.errors import UserError

PIPELINE: tuple[GraphPass, ...] = (
    Canonicalize(),  # first: every later pass sees one spelling for one meaning
    FuseNorms(),  # before everything that looks for a norm
    FuseResidualAdd(),  # takes the norms behind additions
    MergeLinears(),  # while projections still read a norm's output directly
    FuseSiluMul(),  # reads column slices of the merged gate and up
    FoldGate(),  # while the delta rule is opaque: one op, whatever its later form
    FuseQkNormRope(),  # while attention is opaque; takes the q and k norms
    FuseOutputGate(),  # in any order with the two before it
    SelectLogits(),  # while the head is still a plain linear at the graph's end
    FuseLinearEpilogues(),  # takes the merged gate and up, and the norms behind additions
    FuseLinearPrologues(),  # takes the gated norms and gates, for the projections of the one before
    DecodeLinears(),  # last of the fusions: the linears that none of them took
    LowerMixers(),  # mutation enters here: nothing after it may assume a functional graph
    LowerAttention(),  # after the mixers by habit only; the two do not touch each other's ops
    InplaceState(),  # needs the visible gathers and scatters
    FuseConvQkNorm(),  # the ops that take slots: what they leave in a pool stays as it is
    PrefetchStates(),  # the ops that read their slots themselves
    KeepSnapshots(),  # as well: only ops that take slots can write to more than one
)


def with_extra(extra: Sequence[GraphPass]) -> tuple[GraphPass, ...]:
    """The pipeline with passes of a user, each in front of the pass that its `before` names.

    Those in front of one pass keep their order.

    Raises:
        UserError: something that is no pass, a name that is taken, or an unknown `before`.
    """
    check_passes([*PIPELINE, *extra])
    names = [p.name for p in PIPELINE]
    for graph_pass in extra:
        if graph_pass.before not in names:
            raise UserError(
                f"pass {graph_pass.name}: before={graph_pass.before!r} is no pass of the pipeline; "
                f"choose from {', '.join(names)}"
            )
    placed: list[GraphPass] = []
    for known in PIPELINE:
        placed += [p for p in extra if p.before == known.name] + [known]
    return tuple(placed)


def check_name(key: str, name: str, extra: Sequence[GraphPass] = ()) -> None:
    """Check that a pass of this name exists.

    Raises:
        UserError: naming the option and the passes.
    """
    names = [p.name for p in with_extra(extra)]
    if name not in names:
        raise UserError(f"compiler.{key}: no pass {name!r}; choose from {', '.join(names)}")


def executable_prefixes(
    mode: str,
    phase: str,
    disable: Sequence[str] = (),
    stop_after: str | None = None,
    extra: Sequence[GraphPass] = (),
) -> list[tuple[str, list[GraphPass]]]:
    """The prefixes of a mode's pipeline that can be executed, each by its last optional pass.

    Every one has all mandatory passes; the first, called "mandatory", has nothing else.
    """
    selected = select_passes(mode, phase, disable, stop_after, extra)
    pipeline = with_extra(extra)
    mandatory = [p for p in pipeline if p.mandatory and phase in p.phases]
    optional = [p for p in selected if not p.mandatory]
    prefixes = []
    for count in range(len(optional) + 1):
        wanted = [*mandatory, *optional[:count]]
        name = optional[count - 1].name if count else "mandatory"
        prefixes.append((name, [p for p in pipeline if p in wanted]))
    return prefixes


def select_passes(
    mode: str,
    phase: str,
    disable: Sequence[str] = (),
    stop_after: str | None = None,
    extra: Sequence[GraphPass] = (),
) -> list[GraphPass]:
    """The passes of a mode for a phase, in order.

    Args:
        mode: "eager" (mandatory passes only) or "compiled" (all).
        disable: names of passes to leave out.
        stop_after: name of the last pass to run.
        extra: a user's passes.

    Raises:
        UserError: an unknown name, a mandatory pass in `disable`, or a pass named by an option that
            does not run in this mode.
    """
    pipeline = with_extra(extra)
    names = [p.name for p in pipeline]
    mandatory = [p.name for p in pipeline if p.mandatory]
    optional = [p.name for p in pipeline if not p.mandatory]
    stop = [stop_after] if stop_after else []
    for key, wanted in (("disable", disable), ("stop_after", stop)):
        for name in wanted:
            check_name(key, name, extra)
    for name in disable:
        if name in mandatory:
            raise UserError(
                f"compiler.disable: {name!r} is mandatory, no graph runs without it; "
                f"optional passes: {', '.join(optional)}"
            )
    ours = [p.name for p in extra]
    for key, wanted in (("disable", disable), ("stop_after", stop), ("extra_passes", ours)):
        for name in wanted:
            if mode == "eager" and name in optional:
                raise UserError(
                    f"compiler.{key}: {name!r} does not run in compiler.mode='eager', which has "
                    f"{', '.join(mandatory)} alone; choose compiler.mode=compiled"
                )
    end = names.index(stop_after) + 1 if stop_after else len(names)
    for name in disable:
        if name not in names[:end]:
            raise UserError(
                f"compiler.disable: {name!r} stands behind compiler.stop_after={stop_after!r} and "
                "does not run; drop one of the two"
            )
    return [
        p
        for p in pipeline[:end]
        if phase in p.phases and p.name not in disable and (p.mandatory or mode == "compiled")
    ]
