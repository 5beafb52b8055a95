"""Packed integers against what the config states about them, by headers alone.

QC088 zero points or group indices (g_idx) are present and not stated, or stated and not present.
QC089 a part of packed integers has a type or shape that bits and group size do not give.
QC091 routed experts of one layer are stored in more than one format.

compressed-tensors 0.19 (`compressors/pack_quantized/`): weight_zero_point I32 [ceil(N / word), groups],
weight_g_idx I32 [K]. GPTQ (AutoGPTQ 0.7, GPTQModel; read by sglang 0.5.23 and vLLM 0.33): qweight I32
[K / word, N], qzeros I32 [groups, N / word], scales [groups, N], g_idx I32 [K].

Not a validator itself: it has no `VALIDATOR`, so discovery skips it; shapes uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.names import split_parameter
from qconvert.validation.findings import Finding
from qconvert.validators.reading.parts import lost
from qconvert.validators.reading.quantization import (
    PackedInts,
    awq_ints,
    gptq_block,
    gptq_ints,
    ints_of,
)

Shape = tuple[int, ...]

_INT4_SCALES = ("BF16", "F16", "F32")


def int_parts(checkpoint: Checkpoint, shapes: Mapping[str, Shape]) -> Iterator[Finding]:
    """Header rules on packed integers; `shapes` are those of weights by their roles, -1 for a size that
    the config does not state."""
    yield from _packed(checkpoint)
    yield from _gptq(checkpoint, shapes)
    yield from _awq(checkpoint, shapes)
    yield from _experts(checkpoint)


# --- compressed-tensors --------------------------------------------------------------------------


def _packed(checkpoint: Checkpoint) -> Iterator[Finding]:
    alone = lost(checkpoint)
    for name, source in checkpoint.items():
        module, parameter = split_parameter(name)
        if parameter in ("weight_zero_point", "weight_g_idx") and name in alone:
            message = f"belongs to no weight ({module}.weight_packed)"
            yield Finding("QC088", "error", name, message)
        if parameter != "weight_packed" or source.type.dtype != "I32":
            continue
        stated = ints_of(checkpoint, module)
        if stated is None or len(source.type.shape) != 2:
            continue  # QC012, QC027
        yield from _parts(checkpoint, module, source.type, stated)


def _parts(
    checkpoint: Checkpoint, module: str, packed: TensorType, stated: PackedInts
) -> Iterator[Finding]:
    word = 32 // stated.bits
    rows, columns = packed.shape[0], packed.shape[1] * word
    groups = ceil_div(columns, stated.group or columns)
    for part, asked, shape, says in (
        ("weight_zero_point", not stated.symmetric, (ceil_div(rows, word), groups), "symmetric"),
        ("weight_g_idx", stated.ordered, (columns,), "actorder"),
    ):
        name = f"{module}.{part}"
        found = checkpoint.get(name)
        if asked and found is None:
            message = f"has no {part}, but the config's {says} requires one"
            yield Finding("QC088", "error", f"{module}.weight_packed", message)
        elif found is not None and not asked:
            message = f"exists, but the config's {says} says that there is none"
            yield Finding("QC088", "error", name, message)
        elif found is not None:
            dtypes = ("I32",) if part == "weight_zero_point" else ("I32", "I64")
            yield from _unlike(name, found.type, dtypes, shape, stated)


# --- GPTQ's own form -----------------------------------------------------------------------------


def _gptq(checkpoint: Checkpoint, shapes: Mapping[str, Shape]) -> Iterator[Finding]:
    names = [name for name in checkpoint if name.endswith(".qweight")]
    config = gptq_block(checkpoint.quantization_configs)
    if not names or config is None:
        return  # QC012
    found = gptq_ints(checkpoint.quantization_configs)
    if found is None:
        keys = ("bits", "group_size", "checkpoint_format")
        said = ", ".join(f"{key} {config.block.get(key)!r}" for key in keys)
        message = (
            f"expected bits 4 or 8, a group_size (-1: a row) and checkpoint_format gptq or gptq_v2, "
            f"found {said}"
        )
        yield Finding("QC089", "error", config.where, message)
        return
    stated, _ = found
    role_index = checkpoint.role_index
    for name in names:
        module = name.removesuffix(".qweight")
        kind = checkpoint[name].type
        own = gptq_ints(checkpoint.quantization_configs, module)
        if own is None:
            message = (
                "a rule of `dynamic` covers it: expected bits 4 or 8 and a group_size (-1: a row)"
            )
            yield Finding("QC089", "error", name, message)
            continue
        stated = own[0]
        place = role_index.places.get(name)
        shape = None if place is None else shapes.get(place.role.name.removeprefix("mtp."))
        if len(kind.shape) != 2 or kind.dtype != "I32":
            yield Finding("QC089", "error", name, f"expected I32 [K / word, N], found {kind}")
            continue
        if shape is not None and len(shape) == 2 and min(shape) > 0:
            transposed = (shape[1] * stated.bits // 32, shape[0])
            if kind.shape != transposed:
                yield from _unlike(name, kind, ("I32",), transposed, stated)
                continue
        yield from _gptq_parts(checkpoint, module, kind, stated)


def _gptq_parts(
    checkpoint: Checkpoint, module: str, words: TensorType, stated: PackedInts
) -> Iterator[Finding]:
    word = 32 // stated.bits
    columns, rows = words.shape[0] * word, words.shape[1]
    groups = ceil_div(columns, stated.group or columns)
    shapes: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "qzeros": ((groups, ceil_div(rows, word)), ("I32",)),
        "scales": ((groups, rows), _INT4_SCALES),
        "g_idx": ((columns,), ("I32", "I64")),
    }
    for part, (shape, dtypes) in shapes.items():
        name = f"{module}.{part}"
        found = checkpoint.get(name)
        if found is not None:
            yield from _unlike(name, found.type, dtypes, shape, stated)
        elif part != "g_idx" or stated.ordered:
            message = f"has no {part}, which every loader requires"
            yield Finding("QC088", "error", f"{module}.qweight", message)


def _awq(checkpoint: Checkpoint, shapes: Mapping[str, Shape]) -> Iterator[Finding]:
    """AutoAWQ's own form (0.2, version gemm; vLLM 0.33 `awq.py`, sglang 0.5.23 `awq/`): qweight I32
    [K, N / 8], qzeros I32 [groups, N / 8], scales [groups, N]."""
    stated = awq_ints(checkpoint.quantization_configs)
    if stated is None:
        return  # QC012, QC097
    for name in [name for name in checkpoint if name.endswith(".qweight")]:
        module, words = name.removesuffix(".qweight"), checkpoint[name].type
        place = checkpoint.role_index.places.get(name)
        shape = None if place is None else shapes.get(place.role.name.removeprefix("mtp."))
        if len(words.shape) != 2 or words.dtype != "I32":
            yield Finding("QC089", "error", name, f"expected I32 [K, N / 8], found {words}")
            continue
        if shape is not None and len(shape) == 2 and min(shape) > 0:
            wanted = (shape[1], ceil_div(shape[0], 8))
            if words.shape != wanted:
                yield from _unlike(name, words, ("I32",), wanted, stated)
                continue
        columns, rows = words.shape[0], words.shape[1] * 8
        groups = ceil_div(columns, stated.group or columns)
        for part, wanted, dtypes in (
            ("qzeros", (groups, words.shape[1]), ("I32",)), ("scales", (groups, rows), _INT4_SCALES),
        ):  # fmt: skip
            found, asked = (
                checkpoint.get(f"{module}.{part}"),
                part == "scales" or not stated.symmetric,
            )
            if found is not None and not asked:
                message = "exists, but the config's zero_point says that there is none"
                yield Finding("QC088", "error", found.name, message)
            elif found is not None:
                yield from _unlike(found.name, found.type, dtypes, wanted, stated)
            elif asked:
                yield Finding("QC088", "error", name, f"has no {part}, which every loader requires")


def _unlike(
    name: str,
    found: TensorType,
    dtypes: tuple[str, ...],
    shape: tuple[int, ...],
    stated: PackedInts,
) -> Iterator[Finding]:
    if found.dtype in dtypes and found.shape == shape:
        return
    how = f"groups of {stated.group}" if stated.group else "one scale a row"
    message = (
        f"the config states {stated.bits} bits and {how}: expected {' or '.join(dtypes)} "
        f"{list(shape)}, found {found}"
    )
    yield Finding("QC089", "error", name, message)


# --- Experts -------------------------------------------------------------------------------------


_MATRICES = ("weight", "weight_packed", "qweight")


def _experts(checkpoint: Checkpoint) -> Iterator[Finding]:
    """For layers with any packed expert: how each matrix is stored, and in which scheme by the
    config."""
    layers: dict[tuple[bool, int | None], dict[tuple[object, ...], str]] = {}
    for name, place in checkpoint.role_index.places.items():
        role = place.role.name
        base = role.removeprefix("mtp.")
        if place.expert is None or not base.startswith("experts."):
            continue
        if place.parameter not in _MATRICES:
            continue
        module = split_parameter(name)[0]
        packed = place.parameter == "weight_packed"
        scheme = ints_of(checkpoint, module) if packed else None
        form = place.parameter, checkpoint[name].type.dtype, scheme
        layers.setdefault((role != base, place.layer), {}).setdefault(form, name)
    for (draft, layer), forms in layers.items():
        if len(forms) < 2 or all(form[0] == "weight" for form in forms):
            continue
        which = f"{'draft layer' if draft else 'layer'} {layer}"
        first, *others = forms.values()
        message = f"{which}: its experts are stored in {len(forms)} formats; {first} is in another"
        for name in others:
            yield Finding("QC091", "error", name, message)
