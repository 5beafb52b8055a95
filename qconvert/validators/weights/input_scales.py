"""Scales of activations and of the KV cache: each is the number that something else states.

QC068 (of values) a scale is not a finite number above 0.
QC112 a scale is not the source's, not the manifest's constant, not that of the recorded statistics, or
      far from those of the other experts of its layer.

No weight tells what such a scale must be, so a wrong one is in no other comparison. The source's stays
what it is, from one dialect to the other as its reciprocal; `--input-scale` and `--kv-scale` are numbers
in qconvert.json; statistics of a calibration are there as the largest inputs that were read
(`input_maxima`). What nothing states is reported as not checked.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, ClassVar

from qconvert.checkpoint.checkpoint import MANIFEST, Checkpoint
from qconvert.core.graph import Source
from qconvert.core.names import KV_SCALES
from qconvert.core.roles import Kind
from qconvert.core.shown import count
from qconvert.validation.findings import Finding, Proved, Skipped
from qconvert.validation.runner import Folder, Yield, validator
from qconvert.validation.workers import Folders
from qconvert.validators.formats.nvfp4 import MOST, is_part, parts_of
from qconvert.validators.reading.decode import SCALES, scale_floats
from qconvert.validators.reading.matrices import plain_name
from qconvert.validators.reading.pruned import pruned
from qconvert.validators.reading.quantization_tensors import (
    ACTIVATIONS,
    is_of_activations,
    of_cache,
)

if TYPE_CHECKING:
    from qconvert.validators.reading.decode import Floats

_INPUTS = tuple(end for end in ACTIVATIONS if not end.endswith(("zero_point", "g_idx")))
_CACHE = tuple(end[1:] for end in KV_SCALES)
_DIVISOR = "input_global_scale"
_FP8_MOST = 448.0
# A quotient of float32, and the reciprocal of one.
_ROUNDED = 2.0**-22
_OTHER_DIALECT = "as the reciprocal of it"
# Inputs of gate and up are one hidden state: no expert's are so far from the others', as those of down
# may be.
_FAR = 256.0
_BATCH = 256


def is_such_a_scale(checkpoint: Checkpoint, name: str) -> bool:
    """Tell whether a tensor is a scale of activations or of the KV cache."""
    if name.endswith(KV_SCALES):
        return of_cache(checkpoint, name)
    return name.endswith(_INPUTS) and is_of_activations(checkpoint, name)


@dataclass(frozen=True, slots=True)
class Expected:
    """The value that a scale must have: a `number`, or that of another tensor, its reciprocal if
    `inverted`; `by` says who states it."""

    by: str
    number: float = 0.0
    tensor: Source | None = None
    inverted: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """One scale with all that it may be, () if nothing says; of an NVFP4 matrix (QC100) if `is_part`."""

    tensor: Source
    expected: tuple[Expected, ...]
    is_part: bool


@validator(
    "scales of activations and of the KV cache are those of the source or of qconvert.json",
    "data",
    "model",
)
def input_scales(folder: Folder) -> Iterator[Yield]:
    found = [one for one in _scales(folder) if one.tensor.type.dtype in SCALES[:3]]
    alone = [one for one in found if not one.expected]
    cache = sum(one.tensor.name.endswith(_CACHE) for one in alone)
    for number, what in ((len(alone) - cache, "activations"), (cache, "the KV cache")):
        if number:
            why = f"neither {MANIFEST} nor a source says what they are"
            yield Skipped(f"{count(number, 'scale')} of {what} ({why})")
    if alone and len(alone) < len(found):
        yield Proved("scales of activations and of the KV cache that something states are so")
    elif alone:
        yield Proved("scales of activations and of the KV cache are numbers above 0")
    for start in range(0, len(found), _BATCH):
        yield ReadScales(tuple(found[start : start + _BATCH]))
    for layer in _layers(folder.checkpoint, alone):
        yield Peers(layer)


def _scales(folder: Folder) -> Iterator[Scale]:
    checkpoint, source = folder.checkpoint, folder.source
    theirs: dict[str, str] = {}
    less = None if source is None else pruned(checkpoint, source)
    for name in source or ():
        here = name if less is None else less.name(name)
        if here is not None and source is not None and is_such_a_scale(source, name):
            theirs[scale_key(here)] = name
    manifest = checkpoint.manifest or {}
    maxima = _maxima(manifest.get("input_maxima"))
    for name, tensor in checkpoint.items():
        if not is_such_a_scale(checkpoint, name):
            continue
        recorded = _recorded(checkpoint, name, maxima)
        if recorded is not None:
            said = Expected(f"{MANIFEST}'s input_maxima", recorded)
            yield Scale(tensor, (said,), is_part(checkpoint, name))
            continue
        found: list[Expected] = []
        other = theirs.get(scale_key(name))
        if source is not None and other is not None:
            inverted = name.endswith(_DIVISOR) != other.endswith(_DIVISOR)
            by = f"{other} of the source" + (f", {_OTHER_DIALECT}" if inverted else "")
            found.append(Expected(by, tensor=source[other], inverted=inverted))
        key = "kv_scale" if name.endswith(_CACHE) else "input_scale"
        constant = manifest.get(key)
        if isinstance(constant, int | float) and constant > 0:
            value = 1 / constant if name.endswith(_DIVISOR) else constant
            found.append(Expected(f"{MANIFEST}'s {key}", _float32(value)))
        yield Scale(tensor, tuple(found), is_part(checkpoint, name))


def scale_key(name: str) -> str:
    """One text for all spellings of a scale: of activations those of both dialects, of the cache where
    it hangs at attention and where at its projections."""
    module, _, end = plain_name(name).rpartition(".")
    if end in _CACHE:
        return f"{module.removesuffix(f'.{end[0]}_proj').removesuffix('.attn')} {end}"
    spelled = next((one for one in _INPUTS if end.endswith(one)), "")
    side = "output" if spelled.startswith("output") else "input"
    return f"{module} {end.removesuffix(spelled)}{side}"


def _maxima(stated: object) -> dict[tuple[int, bool], tuple[float, ...]]:
    """The largest input of each expert, by layer and whether of down: float32 as hexadecimal text."""
    found: dict[tuple[int, bool], tuple[float, ...]] = {}
    for key, text in stated.items() if isinstance(stated, Mapping) else ():
        layer, _, kind = str(key).partition(".")
        try:
            data = bytes.fromhex(str(text))
            found[int(layer), kind == "down"] = struct.unpack(f"<{len(data) // 4}f", data)
        except (ValueError, struct.error):
            continue  # QC112: nothing is recorded of this layer
    return found


def _recorded(
    checkpoint: Checkpoint, name: str, maxima: Mapping[tuple[int, bool], Sequence[float]]
) -> float | None:
    """Claims that follow from the recorded input of an expert, in the form that its weight is stored
    in."""
    module, _, end = name.rpartition(".")
    weight = next(
        (w for p in ("weight", "weight_packed") if (w := f"{module}.{p}") in checkpoint), None
    )
    place = checkpoint.role_index.places.get(weight or "")
    if not name.endswith(_INPUTS) or weight is None or place is None or place.expert is None:
        return None
    kinds = (Kind.EXPERT_GATE, Kind.EXPERT_UP, Kind.EXPERT_DOWN)
    values = maxima.get((place.layer or 0, place.role.kind is Kind.EXPERT_DOWN), ())
    draft = checkpoint.family.is_mtp(name, checkpoint.role_index.dims)
    if place.role.kind not in kinds or place.expert >= len(values) or draft:
        return None
    most = MOST if parts_of(checkpoint, weight) is not None else _FP8_MOST
    amax = values[place.expert]
    return _float32(most / amax if end == _DIVISOR else amax / most) if amax > 0 else None


def _float32(value: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return float("inf")


def _layers(checkpoint: Checkpoint, alone: Sequence[Scale]) -> Iterator[tuple[Source, ...]]:
    """The input scales of gate and up of each layer's experts, where nothing says what they are."""
    found: dict[tuple[str, int | None], list[Source]] = {}
    for one in alone:
        name = one.tensor.name
        kind = checkpoint.role_index.kind(name)
        if kind in (Kind.EXPERT_GATE, Kind.EXPERT_UP) and one.tensor.type.numel == 1:
            before, _, _ = name.partition(".experts.")
            found.setdefault((before, None), []).append(one.tensor)
    yield from (tuple(members) for members in found.values() if len(members) > 2)


@dataclass(frozen=True, slots=True)
class ReadScales:
    scales: tuple[Scale, ...]

    @property
    def where(self) -> str:
        return self.scales[0].tensor.name

    @property
    def nbytes(self) -> int:
        return sum(one.tensor.type.nbytes * (1 + len(one.expected)) for one in self.scales)

    @property
    def scratch(self) -> int:
        return 16 * max(one.tensor.type.nbytes for one in self.scales)

    def run(self, folders: Folders) -> Iterator[Finding]:
        for one in self.scales:
            values = _read(folders, one.tensor, source=False)
            if values.size == 0:
                continue
            fault = None if one.is_part else _not_positive(one.tensor.name, values)
            fault = fault or _other(folders, one, values)
            if fault is not None:
                yield fault


def _not_positive(name: str, values: Floats) -> Finding | None:
    import numpy as np

    wrong = values[~(np.isfinite(values) & (values > 0))]
    if not wrong.size:
        return None
    cache = "of the KV cache: runtimes take 1 instead, or fail"
    what = cache if name.endswith(_CACHE) else "of activations"
    message = f"expected a finite number above 0, found {float(wrong[0]):g}, a scale {what}"
    return Finding("QC068", "error", name, message)


def _other(folders: Folders, one: Scale, values: Floats) -> Finding | None:
    import numpy as np

    said: list[str] = []
    for expected in one.expected:
        wanted = np.full(values.shape, expected.number)
        if expected.tensor is not None:
            wanted = _read(folders, expected.tensor, source=True).astype(np.float64)
            wanted = 1 / wanted if expected.inverted else wanted
        if wanted.shape != values.shape:
            said.append(f"{wanted.size} numbers ({expected.by})")
            continue
        slack = _ROUNDED if expected.inverted else 0.0
        with np.errstate(all="ignore"):
            if (np.abs(values - wanted) <= slack * wanted).all():
                return None
        said.append(f"{float(wanted[np.argmax(values != wanted)]):.9g} ({expected.by})")
    if not said:
        return None
    found = f"{float(values[0]):.9g}" if values.size == 1 else f"{values.size} others"
    return Finding(
        "QC112", "error", one.tensor.name, f"expected {' or '.join(said)}, found {found}"
    )


@dataclass(frozen=True, slots=True)
class Peers:
    """Input scales of one layer's experts, which share their inputs."""

    scales: tuple[Source, ...]
    scratch: ClassVar[int] = 0

    @property
    def where(self) -> str:
        return self.scales[0].name

    @property
    def nbytes(self) -> int:
        return sum(scale.type.nbytes for scale in self.scales)

    def run(self, folders: Folders) -> Iterator[Finding]:
        values = [float(_read(folders, scale, source=False)[0]) for scale in self.scales]
        middle = median(values)
        for scale, value in zip(self.scales, values, strict=True):
            if value > 0 and middle > 0 and max(value / middle, middle / value) > _FAR:
                message = (
                    f"{value:.6g} is far from the middle of its layer's experts, {middle:.6g}, and all "
                    "of them have the same inputs"
                )
                yield Finding("QC112", "warning", scale.name, message)


def _read(folders: Folders, scale: Source, *, source: bool) -> Floats:
    import numpy as np

    data = np.empty(scale.type.nbytes, np.uint8)
    side = folders.source if source else folders.output
    assert side is not None
    side.read(scale, 0, data.data)
    return scale_floats(data, scale.type.dtype)
