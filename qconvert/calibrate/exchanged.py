"""A solved expert as shards hand it to one another: its codes, and what is known of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from qconvert.calibrate.experts import NAMES, Expert, Found
from qconvert.calibrate.settings import ExpertSchemes, Matrix
from qconvert.calibrate.solve import weight_of
from qconvert.core.errors import RunError
from qconvert.core.int_scheme import Codes, IntScheme, Scheme
from qconvert.matrices.experts import PROJECTIONS
from qconvert.run.exchange import Exchange

if TYPE_CHECKING:
    import numpy as np
    import torch

    Array = np.ndarray[tuple[int, ...], np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class Known:
    """Of one expert: its matrices with their codes; mean squares and largest inputs of `gate_up` and
    `down`; whether it was rounded, which kinds fell back to that, columns without inputs by kind; a hash
    of what its codes mean, which goes on to the next layer."""

    matrices: tuple[Matrix, ...]
    rows: Mapping[str, tuple[Array, Array]]
    rounded: bool
    fallbacks: tuple[str, ...]
    dead: Mapping[str, int]
    meaning: str


def known_of(expert: Expert, matrices: Sequence[Matrix], found: Found) -> Known:
    """What a shard knows of an expert that it has solved."""
    number = expert.number
    return Known(
        tuple(sorted(matrices, key=lambda one: PROJECTIONS.index(one.kind))),
        {name: found.rows[number, name] for name in NAMES},
        number in found.rounded,
        tuple(kind for each, kind in found.fallbacks if each == number),
        {kind: n for (each, kind), n in found.dead.items() if each == number},
        _hash(expert.gate_up, expert.down),
    )


def put(exchange: Exchange, layer: int, expert: int, known: Known) -> str | None:
    """As `exchange.put`."""
    arrays: dict[str, Array] = {}
    listed: dict[str, Any] = {}
    for matrix in known.matrices:
        forms = []
        for number, codes in enumerate(matrix.codes):
            at = f"{matrix.kind}.{number}"
            forms.append({"own": codes.own})
            arrays[f"{at}.codes"] = _packed(codes.codes)
            arrays[f"{at}.scale"] = codes.scale
            if codes.zero is not None:
                arrays[f"{at}.zero"] = codes.zero
            if codes.g_idx is not None:
                arrays[f"{at}.g_idx"] = codes.g_idx
        listed[matrix.kind] = {"codes": forms, "sources": [dict(one) for one in matrix.sources]}
    for name, (square, most) in known.rows.items():
        arrays[f"{name}.mean_square"], arrays[f"{name}.absmax"] = square, most
    about = {
        "matrices": listed, "rounded": known.rounded, "fallbacks": list(known.fallbacks),
        "dead": dict(known.dead), "meaning": known.meaning,
    }  # fmt: skip
    return exchange.put(layer, expert, about, arrays)


def get(
    exchange: Exchange,
    layer: int,
    expert: int,
    sides: Mapping[str, tuple[int, int]],
    targets: Sequence[ExpertSchemes],
) -> Known:
    """What another shard knows of an expert. `sides` are rows and columns by kind. Raises RunError where
    that is not what the model and the targets ask for."""
    elements = sum(rows * columns for rows, columns in sides.values())
    about, arrays = exchange.get(layer, expert, len(targets) * 8 * elements + (1 << 20))
    where = f"layer {layer}, expert {expert}"
    try:
        matrices = []
        for kind in PROJECTIONS:
            one = about["matrices"][kind]
            forms = one["codes"]
            if len(forms) != len(targets):
                raise ValueError(f"{len(forms)} forms of {kind}, expected {len(targets)}")
            codes = []
            for number, (form, target) in enumerate(zip(forms, targets, strict=True)):
                at = f"{kind}.{number}"
                found = Codes(
                    _unpacked(arrays[f"{at}.codes"], sides[kind]), arrays[f"{at}.scale"],
                    arrays.get(f"{at}.zero"), arrays.get(f"{at}.g_idx"), form["own"],
                )  # fmt: skip
                _check(found, target.scheme(kind), kind)
                codes.append(found)
            matrices.append(Matrix(layer, expert, kind, codes, _sources(one["sources"])))
        rows = {name: (arrays[f"{name}.mean_square"], arrays[f"{name}.absmax"]) for name in NAMES}
        return Known(
            tuple(matrices), rows, bool(about["rounded"]), tuple(about["fallbacks"]),
            dict(about["dead"]), str(about["meaning"]),
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{exchange.folder / f'{layer}-{expert}'}: {where}: was not written by this version of "
            f"qconvert: {error}; remove it"
        ) from error


def _check(codes: Codes, scheme: Scheme, kind: str) -> None:
    """Raise ValueError for codes that no solver finds for a scheme."""
    rows, columns = codes.codes.shape
    groups = scheme.groups(columns)
    integers = isinstance(scheme, IntScheme)
    low, high = (scheme.low, scheme.high) if isinstance(scheme, IntScheme) else (-12, 12)
    if codes.codes.min() < low or codes.codes.max() > high:
        raise ValueError(f"codes of {kind} beyond {low} to {high}")
    wanted: dict[str, tuple[tuple[int, ...], str]] = {"scale": ((rows, groups), "float32")}
    if isinstance(scheme, IntScheme) and not scheme.symmetric:
        wanted["zero"] = ((rows, groups), "int8")
    if isinstance(scheme, IntScheme) and scheme.actorder == "group":
        wanted["g_idx"] = ((columns,), "int32")
    for name in ("scale", "zero", "g_idx"):
        array = getattr(codes, name)
        found = None if array is None else (array.shape, str(array.dtype))
        if found != wanted.get(name):
            raise ValueError(f"{name} of {kind}: {found}, expected {wanted.get(name)}")
    if codes.g_idx is not None and not _within(codes.g_idx, groups):
        raise ValueError(f"g_idx of {kind} beyond 0 to {groups - 1}")
    if isinstance(codes.own, float) == integers or not isinstance(codes.own, float | None):
        raise ValueError(f"own scale of {kind}: {codes.own!r}")


def _within(values: Array, stop: int) -> bool:
    return bool(values.min() >= 0 and values.max() < stop)


def _sources(found: Any) -> list[dict[str, Any]]:
    """Ranges that a matrix was read from."""
    kinds = {"name": str, "start": int, "stop": int, "xxh3": str}
    for one in found:
        if one.keys() != kinds.keys() or any(type(one[k]) is not kind for k, kind in kinds.items()):
            raise ValueError("sources that are no ranges")
    return list(found)


def expert_of(
    known: Known, targets: Sequence[ExpertSchemes], device: str, *, every: bool
) -> Expert:
    """An expert as it answers once it is solved: what the codes of the first target mean. Raises
    RunError where that is not what they meant to who found them."""
    import torch

    made = {
        matrix.kind: weight_of(matrix.codes[0], targets[0].scheme(matrix.kind), device)
        for matrix in known.matrices
    }
    number = known.matrices[0].expert
    assert number is not None
    gate_up = torch.cat([made["gate_proj"], made["up_proj"]])
    found = _hash(gate_up, made["down_proj"])
    if found != known.meaning:
        raise RunError(
            f"layer {known.matrices[0].layer}, expert {number}: its codes mean other weights here than "
            "where they were found; run all shards with the same versions of torch and qconvert"
        )
    sources = {matrix.kind: matrix.sources for matrix in known.matrices}
    return Expert(number, gate_up, made["down_proj"], every, sources)


def note(known: Known, found: Found) -> None:
    """Add what another shard knows to what a layer's statistics are made of."""
    number = known.matrices[0].expert
    assert number is not None
    for name, rows in known.rows.items():
        found.rows[number, name] = rows
    if known.rounded and number not in found.rounded:
        found.rounded.append(number)
    found.fallbacks += [(number, kind) for kind in known.fallbacks]
    for kind, columns in known.dead.items():
        found.dead[number, kind] = columns


def _hash(gate_up: torch.Tensor, down: torch.Tensor) -> str:
    """Of BF16 weights."""
    import torch

    digest = xxhash.xxh3_128()
    for weight in (gate_up, down):
        data: Any = weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy()
        digest.update(memoryview(data).cast("B"))
    return digest.hexdigest()


def _packed(codes: Array) -> Array:
    """Two codes of -8 to 7 in a byte, if all are; uint8 then, else int8 as they are."""
    import numpy as np

    if codes.size % 2 or codes.min() < -8 or codes.max() > 7:
        return codes
    nibbles = (codes.reshape(-1) + np.int8(8)).view(np.uint8)
    packed: Array = nibbles[0::2] | (nibbles[1::2] << 4)
    return packed


def _unpacked(stored: Array, shape: tuple[int, int]) -> Array:
    """The codes again, int8."""
    import numpy as np

    if stored.dtype == np.int8:
        return stored.reshape(shape)
    if stored.dtype != np.uint8 or 2 * stored.size != shape[0] * shape[1]:
        raise ValueError(f"{stored.size} bytes of codes, expected {shape[0] * shape[1] // 2}")
    codes = np.empty(2 * stored.size, np.int8)
    codes[0::2] = (stored & 15).view(np.int8)
    codes[1::2] = (stored >> 4).view(np.int8)
    codes -= 8
    found: Array = codes.reshape(shape)
    return found
