"""Work on prepared experts (experimental): scalars against the scales they are derived from, bytes
against the source's. Not a validator itself: it has no `VALIDATOR`, so discovery skips it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qconvert.core.graph import Source
from qconvert.validation.findings import Finding
from qconvert.validation.workers import Folders, Reads
from qconvert.validators.formats.nvfp4 import Dialect
from qconvert.validators.reading.prepared import SCALARS, scale_places, source_rows

if TYPE_CHECKING:
    import numpy as np

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
