"""Routed experts stored in NVFP4, one matrix per expert, in both dialects (experimental).

modelopt: `weight` U8 (two E2M1 codes a byte), `weight_scale` E4M3 for 16 columns,
`weight_scale_2` and `input_scale` F32, multipliers. compressed-tensors (nvfp4-pack-quantized):
`weight_packed`, `weight_scale`, `weight_global_scale` and `input_global_scale`, divisors. Input scales
need a calibration and may be absent everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from qconvert.core.dtypes import Shape, TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output

GROUP = 16  # columns that share a block scale
_NAME = re.compile(r"(.+\.experts)\.([0-9]{1,9})\.([a-z0-9_]+)\.([a-z0-9_]+)")
# (w1, w3, w2) as checkpoints name them.
_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


@dataclass(frozen=True, slots=True)
class Dialect:
    """A checkpoint's names of a matrix's parameters. `inverted`: per-tensor scales are divisors."""

    name: str
    weight: str
    block: str
    tensor: str
    activation: str
    inverted: bool

    @property
    def parameters(self) -> tuple[str, str, str, str]:
        return self.weight, self.block, self.tensor, self.activation


MODELOPT = Dialect("modelopt", "weight", "weight_scale", "weight_scale_2", "input_scale", False)
COMPRESSED_TENSORS = Dialect(
    "compressed-tensors",
    "weight_packed",
    "weight_scale",
    "weight_global_scale",
    "input_global_scale",
    True,
)
DIALECTS = {dialect.name: dialect for dialect in (MODELOPT, COMPRESSED_TENSORS)}

# A layer: parameters by name, of each expert's each projection.
Layer = dict[tuple[int, str], dict[str, Output]]


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a layer of experts: its dialect, projections (w1 and w3 if gated, then w2), count,
    sizes, the shape of a per-tensor scale, and whether inputs have scales."""

    dialect: Dialect
    projections: tuple[str, ...]
    experts: int
    hidden: int
    intermediate: int
    scalar: Shape
    activations: bool

    @property
    def gated(self) -> bool:
        return len(self.projections) == 3

    def __str__(self) -> str:
        kind = "gated" if self.gated else "plain"
        scales = "with" if self.activations else "without"
        return (
            f"{self.experts} {kind} experts of {self.dialect.name}, hidden size {self.hidden}, "
            f"intermediate size {self.intermediate}, {scales} input scales"
        )


def layers_of(tensors: Mapping[str, Output]) -> tuple[dict[str, Layer], dict[str, Output]]:
    """Parameters of routed experts by the name their layer's share, and all other tensors."""
    layers: dict[str, Layer] = {}
    others: dict[str, Output] = {}
    for name, output in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            others[name] = output
            continue
        base, expert, projection, parameter = match.groups()
        layer = layers.setdefault(base, {})
        layer.setdefault((int(expert), projection), {})[parameter] = output
    return layers, others


def named(base: str, layer: Layer) -> dict[str, Output]:
    """A layer's tensors under their own names."""
    return {
        f"{base}.{expert}.{projection}.{parameter}": output
        for (expert, projection), matrix in layer.items()
        for parameter, output in matrix.items()
    }


def dialect_of(layer: Layer) -> Dialect | None:
    """The dialect of a layer's first NVFP4 matrix, None if there is none."""
    for matrix in layer.values():
        for dialect in DIALECTS.values():
            if dialect.tensor in matrix:
                return dialect
    return None


def form_of(base: str, layer: Layer, experts: int) -> Form:
    """The form of an NVFP4 layer, checked to its last parameter. Raises PlanError naming the first that
    is missing, unexpected, or of another type or shape than its layer requires."""
    dialect = dialect_of(layer)
    assert dialect is not None
    projections = _projections(base, layer)
    for expert, projection in layer:
        if expert >= experts:
            raise PlanError(f"'{base}.{expert}.{projection}': the config counts {experts} experts")
    activations = any(dialect.activation in matrix for matrix in layer.values())
    wanted = set(dialect.parameters if activations else dialect.parameters[:3])
    for expert in range(experts):
        for projection in projections:
            found = layer.get((expert, projection), {}).keys()
            for parameter in sorted(wanted ^ found):
                what = (
                    "is missing" if parameter in wanted else "is not a parameter of NVFP4 experts"
                )
                raise PlanError(f"'{base}.{expert}.{projection}.{parameter}' {what}")
    down = layer[0, projections[-1]]
    shape = down[dialect.weight].type.shape
    if len(shape) != 2:
        raise PlanError(
            f"'{base}.0.{projections[-1]}.{dialect.weight}': expected a matrix, found "
            f"{down[dialect.weight].type}"
        )
    scalar = down[dialect.tensor].type.shape
    if down[dialect.tensor].type.numel != 1:
        raise PlanError(
            f"'{base}.0.{projections[-1]}.{dialect.tensor}': expected one element, found "
            f"{down[dialect.tensor].type}"
        )
    form = Form(dialect, projections, experts, shape[0], 2 * shape[1], scalar, activations)
    _check_types(base, layer, form)
    return form


def _projections(base: str, layer: Layer) -> tuple[str, ...]:
    """w1, w3, w2 of gated experts; up and down of plain ones."""
    known = {projection for _, projection in layer}
    for gate, up, down in _PROJECTIONS:
        if known == {gate, up, down}:
            return gate, up, down
        if known in ({up, down}, {gate, down}):
            plain = up if up in known else gate
            return plain, down
    raise PlanError(f"{base}: expected experts of gate, up and down, or two, found {sorted(known)}")


def _check_types(base: str, layer: Layer, form: Form) -> None:
    hidden, intermediate, dialect = form.hidden, form.intermediate, form.dialect
    for (expert, projection), matrix in layer.items():
        down = projection == form.projections[-1]
        rows, columns = (hidden, intermediate) if down else (intermediate, hidden)
        types = (
            TensorType("U8", (rows, columns // 2)),
            TensorType("F8_E4M3", (rows, columns // GROUP)),
            TensorType("F32", form.scalar),
            TensorType("F32", form.scalar),
        )
        for parameter, kind in zip(dialect.parameters, types, strict=True):
            found = matrix[parameter].type if parameter in matrix else kind
            if found != kind:
                raise PlanError(
                    f"'{base}.{expert}.{projection}.{parameter}': expected {kind}, found {found}"
                )
