"""The passes for a user's own module: those of the pipeline that need neither state nor a config.

Owns their order and the options that name them. Does not own the passes, which are the same as for
MiniQwen, but for the two that only modules of any rank need.

    passes = select_module_passes(disable=("merge_linears",))
"""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.compiler.passes.base import GraphPass
from minivllm.compiler.passes.canonicalize import Canonicalize
from minivllm.compiler.passes.fit_views import FitViews
from minivllm.compiler.passes.flatten_rows import FlattenRows
from minivllm.compiler.passes.fuse_norms import FuseNorms
from minivllm.compiler.passes.fuse_output_gate import FuseOutputGate
from minivllm.compiler.passes.fuse_residual_add import FuseResidualAdd
from minivllm.compiler.passes.fuse_silu_mul import FuseSiluMul
from minivllm.compiler.passes.merge_linears import MergeLinears
from minivllm.errors import UserError

MODULE_PIPELINE: tuple[GraphPass, ...] = (
    Canonicalize(),  # the first five as in PIPELINE, for the same reasons
    FuseNorms(),
    FuseResidualAdd(),
    MergeLinears(),
    FuseSiluMul(),
    FuseOutputGate(),
    FlattenRows(),  # behind all fusions, which so need to know no rank
    FitViews(),  # last: it looks at the strides that all others left
)


def check_module_pass(key: str, name: str) -> None:
    """Check that a pass of this name runs on modules.

    Raises:
        UserError: naming the option and the passes.
    """
    names = [p.name for p in MODULE_PIPELINE]
    if name not in names:
        raise UserError(f"{key}: no pass {name!r} for modules; choose from {', '.join(names)}")


def select_module_passes(disable: Sequence[str] = ()) -> list[GraphPass]:
    """The passes to run on a module, in order.

    Args:
        disable: names of passes to leave out.

    Raises:
        UserError: an unknown name, or a pass that nothing runs without.
    """
    optional = [p.name for p in MODULE_PIPELINE if not p.mandatory]
    for name in disable:
        check_module_pass("disable", name)
        if name not in optional:
            raise UserError(
                f"disable: {name!r} is mandatory, no graph runs without it; "
                f"optional passes: {', '.join(optional)}"
            )
    return [p for p in MODULE_PIPELINE if p.name not in disable]
