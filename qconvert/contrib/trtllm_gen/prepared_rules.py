"""Experimental: folders prepared for TensorRT-LLM's MoE kernels: marker, sizes, scalars, byte order.

QC105 tensors are prepared, but the config names a method that stock runtimes take.
QC106 the marker in config.json, the shards' metadata and the tensors disagree.
QC107 sizes that the layout's tiles cannot hold.
QC108 a scalar does not follow from the scales it is derived from.
QC109 a prepared tensor is not the source's in the layout's order.

A shuffled matrix has the shape of an unshuffled one, so only the source's bytes can prove the order: at
level full, against the NVFP4 folder that was prepared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.graph import Source
from qconvert.core.shown import count
from qconvert.validation.findings import Finding, Proved, Skipped
from qconvert.validation.runner import Folder, Need, NotChecked, Yield
from qconvert.validation.workers import Folders, Reads
from qconvert.validators.formats.nvfp4 import BLOCK, Dialect
from qconvert.validators.reading.prepared import (
    FACT,
    METHOD,
    SCALARS,
    TILE,
    bases,
    marker,
    metadata_layout,
    scale_places,
    source_rows,
)

if TYPE_CHECKING:
    import numpy as np

    from qconvert.core.dtypes import Shape

    Array = np.ndarray[Any, Any]


Tensors = Mapping[str, Source]
_ROUNDED = 2.0**-20  # three roundings to float32, with a margin


@dataclass(frozen=True)
class Scalars:
    """Those of one layer (sglang): one scale serves the inputs of all experts, the largest
    multiplier a or the smallest divisor; g1 = a1 * gate, g2 = a2 * down, the gated c = a1 * up / a2,
    else 1 / a2, and 1 / a1, 1 / a2."""

    base: str
    dialect: Dialect
    gated: bool
    tensors: Tensors

    @property
    def where(self) -> str:
        return f"{self.base}.w13_{self.dialect.global_scale}"

    @property
    def nbytes(self) -> int:
        return sum(self.tensors[name].type.nbytes for name in self._names)

    @property
    def scratch(self) -> int:
        return 16 * self.nbytes

    @property
    def _names(self) -> tuple[str, ...]:
        d = self.dialect
        return *(
            f"{w}_{part}" for part in (d.global_scale, d.input) for w in ("w13", "w2")
        ), *SCALARS

    def run(self, folders: Folders) -> Iterator[Finding]:
        import numpy as np

        read = {name: _floats(folders.output, self.tensors[name]) for name in self._names}
        own13, own2, in13, in2 = (read[name] for name in self._names[:4])
        with np.errstate(all="ignore"):
            if self.dialect.divisor:
                own13, own2, in13, in2 = (1 / values for values in (own13, own2, in13, in2))
            a1, a2 = in13.max(), in2.max()
            gate, up = (own13[0::2], own13[1::2]) if self.gated else (own13, own13)
            c = a1 * up / a2 if self.gated else 1 / a2
            wanted = dict(zip(SCALARS, (a1 * gate, a2 * own2, c, 1 / a1, 1 / a2), strict=True))
            for name, expected in wanted.items():
                found = read[name]
                wide = np.broadcast_to(expected, found.shape)
                fits = (np.abs(found - wide) <= _ROUNDED * np.abs(wide)) & (wide > 0)
                if not fits.all():
                    at = int(np.argmin(fits))
                    message = (
                        f"expert {at}: expected {wide[at]:.9g} by the layer's scales, found "
                        f"{found[at]:.9g}"
                    )
                    yield Finding("QC108", "error", self.tensors[name].name, message)


def _floats(reader: Reads, tensor: Source) -> Array:
    import numpy as np

    data = np.empty(tensor.type.numel, "<f4")
    reader.read(tensor, 0, data.view(np.uint8).data)
    return data.astype(np.float64)


@dataclass(frozen=True)
class Matrices:
    """One expert: prepared tensors [E, ...] against the source's, which are by projection and
    parameter. `projections` are gate, up and down, or up and down."""

    base: str
    dialect: Dialect
    expert: int
    projections: tuple[str, ...]
    tensors: Tensors
    source: Mapping[tuple[str, str], Source]

    @property
    def where(self) -> str:
        return f"{self.base}.w13_{self.dialect.weight}"

    @property
    def nbytes(self) -> int:
        return 2 * sum(source.type.nbytes for source in self.source.values())

    @property
    def scratch(self) -> int:
        """Both sides of one matrix, the source's in another order, and the places of scales."""
        return 4 * max(self._size(name) for name in self.tensors) + 16 * max(
            self._size(f"{w}_weight_scale") for w in ("w13", "w2")
        )

    def _size(self, name: str) -> int:
        kind = self.tensors[name].type
        return kind.nbytes // max(1, kind.shape[0]) if kind.shape else kind.nbytes

    def _members(self, name: str) -> tuple[str, tuple[str, ...]]:
        """A tensor's parameter, and the projections it is made of."""
        which, _, part = name.partition("_")
        return part, self.projections[:-1] if which == "w13" else self.projections[-1:]

    def misfit(self) -> tuple[str, str] | None:
        """The first tensor whose source is missing or has another number of bytes."""
        for name, tensor in self.tensors.items():
            if name in SCALARS:
                continue
            part, members = self._members(name)
            found = [self.source.get((member, part)) for member in members]
            size = sum(source.type.nbytes for source in found if source is not None)
            if None in found or size != self._size(name):
                message = (
                    f"expert {self.expert}: expected {self._size(name)} bytes of "
                    f"{' and '.join(members)} in the source, found {size}"
                )
                return tensor.name, message
        return None

    def run(self, folders: Folders) -> Iterator[Finding]:
        import numpy as np

        for name, tensor in self.tensors.items():
            if name in SCALARS:
                continue
            part, members = self._members(name)
            size = self._size(name)
            made = np.empty(size, np.uint8)
            folders.output.read(tensor, self.expert * size, made.data)
            parts = []
            for member in members:
                source = self.source[member, part]
                data = np.empty(source.type.nbytes, np.uint8)
                folders.source.read(source, 0, data.data)
                parts.append(data)
            given = np.concatenate(parts)
            wanted = self._ordered(given, tensor, part, gated=len(members) == 2)
            differ = wanted != made
            if differ.any():
                at = int(np.argmax(differ))
                message = (
                    f"expert {self.expert}, byte {at}: expected {wanted[at]} of "
                    f"{' and '.join(members)} in the layout's order, found {made[at]}; "
                    f"{np.count_nonzero(differ)} of {size} bytes differ{_hint(made, given)}"
                )
                yield Finding("QC109", "error", tensor.name, message)

    def _ordered(self, given: Array, tensor: Source, part: str, *, gated: bool) -> Array:
        """The source's bytes in the expected order."""
        import numpy as np

        if part not in (self.dialect.weight, "weight_scale"):
            return given
        rows, columns = tensor.type.shape[1:]
        lines: Array = given.reshape(rows, columns)[source_rows(rows, gated=gated)]
        if part == self.dialect.weight:
            return lines.reshape(-1)
        laid = np.empty(given.size, np.uint8)
        laid[scale_places(rows, columns)] = lines
        return laid


def _hint(made: Array, given: Array) -> str:
    import numpy as np

    return "; they are in the source's order, unprepared" if np.array_equal(made, given) else ""


@dataclass(frozen=True)
class Layer:
    """One layer's prepared tensors by their short names (`w13_weight`), as far as they are present."""

    base: str
    dialect: Dialect
    tensors: Tensors

    @property
    def gated(self) -> bool:
        own = self.tensors.get(f"w13_{self.dialect.global_scale}")
        return own is not None and len(own.type.shape) == 2

    @property
    def inputs(self) -> bool:
        return f"w13_{self.dialect.input}" in self.tensors or any(
            n in self.tensors for n in SCALARS
        )


@dataclass(frozen=True)
class Prepared:
    """Headers, then scalars, then at level full every byte against the source's."""

    name: str = "prepared"
    proves: str = (
        "prepared experts (experimental) match their marker, in sizes that their tiles hold"
    )
    needs: frozenset[Need] = frozenset({"model", "prepared"})

    def __call__(self, folder: Folder) -> Iterator[Yield]:
        checkpoint = folder.checkpoint
        layers = list(_layers(checkpoint))
        faults = list(_faults(checkpoint, layers))
        yield from faults
        if not layers and not faults:
            raise NotChecked("no tensor is of prepared experts")
        if faults or folder.request.level == "headers":
            return
        for layer in layers:
            if layer.inputs:
                yield Scalars(layer.base, layer.dialect, layer.gated, layer.tensors)
        yield from _round_trip(folder, layers)


def _layers(checkpoint: Checkpoint) -> Iterator[Layer]:
    for base, dialect in bases(checkpoint).items():
        names = [f"{w}_{part}" for w in ("w13", "w2") for part in _parts(dialect)]
        found = {
            n: s for n in (*names, *SCALARS) if (s := checkpoint.get(f"{base}.{n}")) is not None
        }
        yield Layer(base, dialect, found)


def _parts(dialect: Dialect) -> tuple[str, str, str, str]:
    return dialect.weight, "weight_scale", dialect.global_scale, dialect.input


# --- Headers -------------------------------------------------------------------------------------


def _faults(checkpoint: Checkpoint, layers: list[Layer]) -> Iterator[Finding]:
    config = marker(checkpoint)
    if not layers:
        if config is not None and "stage" not in (checkpoint.manifest or {}):
            message = "states prepared experts: expected *.experts.w13_weight in U8, found none"
            yield Finding("QC106", "error", config.where, message)
        return
    if config is None:
        found = [c.method for c in checkpoint.quantization_configs]
        message = f"expected quant_method {METHOD!r} for prepared tensors, found {found}"
        yield Finding("QC105", "error", f"{layers[0].base}.w13_{layers[0].dialect.weight}", message)
        return
    layout = config.block.get("layout")
    if not isinstance(layout, Mapping):
        yield Finding("QC106", "error", config.where, "the marker has no `layout`")
        return
    for where, other in (
        ("the shards' metadata", metadata_layout(checkpoint)),
        ("qconvert.json", (checkpoint.manifest or {}).get(FACT)),
    ):
        yield from _unlike(config.where, layout, where, other)
    moe = checkpoint.role_index.dims.groups.get("moe", ())
    if (
        checkpoint.family.name != "generic"
        and len(layers) < len(moe)
        and not _has_others(checkpoint)
    ):
        message = (
            f"expected {count(len(moe), 'layer')} of experts by the config, but {len(layers)} are "
            "prepared"
        )
        yield Finding("QC106", "error", config.where, message)
    for layer in layers:
        yield from _layer_faults(layer, layout)


def _has_others(checkpoint: Checkpoint) -> bool:
    """Return whether some experts are separate matrices: layers in other formats stay unchanged."""
    return any(".experts.0." in name for name in checkpoint)


def _unlike(where: str, layout: Mapping[str, Any], other: str, said: Any) -> Iterator[Finding]:
    if said is None:
        if other != "qconvert.json":
            yield Finding(
                "QC106", "error", where, f"{other} have no {FACT}, but this block states one"
            )
        return
    if not isinstance(said, Mapping):
        yield Finding("QC106", "error", where, f"{other}: its {FACT} cannot be read")
        return
    shared = layout.keys() & said.keys()
    wrong = [key for key in sorted(shared) if layout[key] != said[key]]
    lacking = sorted({"dialect", "gated", "num_experts"} - shared)
    for key in wrong:
        message = f"its layout says {key} {layout[key]!r}, but {other} {said[key]!r}"
        yield Finding("QC106", "error", where, message)
    if lacking:
        message = f"{', '.join(lacking)} of the layout: stated only here or only in {other}"
        yield Finding("QC106", "error", where, message)


def _layer_faults(layer: Layer, layout: Mapping[str, Any]) -> Iterator[Finding]:
    dialect, base = layer.dialect, layer.base
    weight = layer.tensors[f"w13_{dialect.weight}"]
    if layout.get("dialect") != dialect.name:
        message = f"has a name of {dialect.name}, but the marker says {layout.get('dialect')!r}"
        yield Finding("QC106", "error", weight.name, message)
        return
    if len(weight.type.shape) != 3:
        yield Finding(
            "QC107", "error", weight.name, f"expected [E, rows, H / 2], found {weight.type}"
        )
        return
    experts, rows, half = weight.type.shape
    hidden, gated = 2 * half, layout.get("gated") is not False
    intermediate = rows // 2 if gated else rows
    if rows % TILE or hidden % TILE or intermediate % (TILE // 2):
        message = (
            f"expected rows and hidden size in whole {TILE}s and an intermediate size in {TILE // 2}s, "
            f"found {rows}, {hidden} and {intermediate}"
        )
        yield Finding("QC107", "error", weight.name, message)
        return
    sizes = {"num_experts": experts, "hidden_size": hidden, "intermediate_size": intermediate}
    for key, size in sizes.items():
        if layout.get(key) != size:
            message = f"gives {key} {size}, but the marker says {layout.get(key)!r}"
            yield Finding("QC106", "error", weight.name, message)
            return
    inputs = layout.get("derived_scalars") is True
    for name, wanted in _shapes(dialect, experts, hidden, intermediate, gated=gated).items():
        given = layer.tensors.get(name)
        needed = inputs or not (name in SCALARS or name.endswith(dialect.input))
        if given is None and needed:
            message = f"is missing, but the marker says derived_scalars {inputs}"
            yield Finding("QC106", "error", f"{base}.{name}", message)
        elif given is not None and not needed:
            yield Finding(
                "QC106", "error", given.name, "is present, but the marker says no input scales"
            )
        elif given is not None and given.type.shape not in wanted:
            shapes = " or ".join(str(list(shape)) for shape in wanted)
            yield Finding("QC107", "error", given.name, f"expected {shapes}, found {given.type}")


def _shapes(
    dialect: Dialect, experts: int, hidden: int, intermediate: int, *, gated: bool
) -> dict[str, tuple[Shape, ...]]:
    """The shapes each tensor of a layer may have."""
    rows = 2 * intermediate if gated else intermediate
    each: Shape = (experts,)
    pair = (experts, 2) if gated else each
    one: tuple[Shape, ...] = ((), (1,), each)
    return {
        f"w13_{dialect.weight}": ((experts, rows, hidden // 2),),
        f"w2_{dialect.weight}": ((experts, hidden, intermediate // 2),),
        "w13_weight_scale": ((experts, rows, hidden // BLOCK),),
        "w2_weight_scale": ((experts, hidden, intermediate // BLOCK),),
        **dict.fromkeys((f"w13_{dialect.global_scale}", f"w13_{dialect.input}"), (pair,)),
        **dict.fromkeys((f"w2_{dialect.global_scale}", f"w2_{dialect.input}"), (each,)),
        **dict.fromkeys(SCALARS[:3], (each,)),
        **dict.fromkeys(SCALARS[3:], one),
    }


# --- Bytes ---------------------------------------------------------------------------------------


def _round_trip(folder: Folder, layers: list[Layer]) -> Iterator[Yield]:
    source = folder.source
    config = marker(folder.checkpoint)
    if source is None or config is None or folder.request.level != "full":
        yield Skipped("the order of prepared bytes (give --level full --against the NVFP4 source)")
        return
    projections = tuple(map(str, config.block["layout"].get("projections", ())))
    tasks: list[Matrices] = []
    for layer in layers:
        experts = layer.tensors[f"w13_{layer.dialect.weight}"].type.shape[0]
        for expert in range(experts):
            parts = {
                (p, part): found
                for p in projections
                for part in _parts(layer.dialect)
                if (found := source.get(f"{layer.base}.{expert}.{p}.{part}")) is not None
            }
            if not any(part == layer.dialect.global_scale for _, part in parts):
                yield Skipped(
                    "the order of prepared bytes (the source's experts are not NVFP4 apart)"
                )
                return
            task = Matrices(layer.base, layer.dialect, expert, projections, layer.tensors, parts)
            fault = task.misfit()
            if fault is None:
                tasks.append(task)
            else:
                yield Finding("QC109", "error", *fault)
    yield from tasks
    yield Proved("prepared bytes (experimental) are the NVFP4 source's, in the layout's order")


VALIDATOR = Prepared()
