"""Linear layers beside the routed experts, whose codes a calibration finds."""

from __future__ import annotations

from collections.abc import Iterable

from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, Source
from qconvert.core.int_scheme import Packer
from qconvert.core.names import split_parameter
from qconvert.matrices.calibrated import Calibrated
from qconvert.matrices.experts import check_not_computed, solved_by
from qconvert.matrices.stored import Stored
from qconvert.plan.plan import Plan


def calibrated_linear(
    plan: Plan,
    module: str,
    weight: Stored,
    names: Iterable[str],
    packers: tuple[Packer, ...],
    digest: str,
) -> tuple[tuple[Output, ...], ...]:
    """A linear's matrix whose codes a calibration finds: the results of each packer. `names` are the
    tensors of the plan that it is read from.

    Raises PlanError where the matrix is of no size that a packer takes, is in no decoder layer, or is
    not one of the checkpoint, from which a calibration reads the model."""
    check_not_computed(module, weight)
    places = plan.role_index.places
    layers = {places[name].layer for name in names if name in places}
    layer = layers.pop() if len(layers) == 1 else None
    if layer is None:
        raise PlanError(
            f"{module} is in no decoder layer, and a calibration runs these one after the other: "
            "ignore it"
        )
    op = Calibrated(weight.decoder, packers, layer, None, _stored_as(module, weight), digest)
    return solved_by(op, module, weight)


def _stored_as(module: str, weight: Stored) -> str:
    """The module that a matrix is in the checkpoint, which an earlier pass may have renamed."""
    pieces = [piece for arg in weight.args for piece in arg.pieces]
    sources = [piece.origin for piece in pieces if isinstance(piece.origin, Source)]
    whole = all(
        piece.start == 0 and piece.stop == source.type.nbytes
        for piece, source in zip(pieces, sources, strict=True)
    )
    found = {split_parameter(source.name)[0] for source in sources}
    if whole and len(found) == 1 and len(pieces) == len(weight.args):
        return found.pop()
    raise PlanError(
        f"{module} is cut or joined by an earlier pass from {', '.join(sorted(found))}, and a "
        "calibration solves matrices as the checkpoint has them: make that pass a conversion of its "
        "own, or ignore this module"
    )
