"""Packed integers in the own forms of GPTQ (AutoGPTQ 0.7, GPTQModel; read by sglang and vLLM) and of
AutoAWQ (0.2, version gemm; vLLM `awq.py`, sglang `awq/`), of matrices [K, N].

GPTQ: `qweight` I32 [K / word, N], `qzeros` I32 [groups, N / word], `scales` [groups, N], `g_idx` I32
[K], which consumers read only if the config says desc_act. AWQ: `qweight` I32 [K, N / 8], `qzeros` I32
[groups, N / 8], `scales` [groups, N].

QC089 packed integers have a type or shape that the config's bits and group size do not give.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from qconvert.checkpoint.checkpoint import Checkpoint, QuantConfig
from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.validation.findings import Finding
from qconvert.validators.formats.packed import (
    INDEX,
    INT_SCALES,
    PackedInts,
    Part,
    checked,
    packed_ints,
    part_faults,
    unlike,
)
from qconvert.validators.reading.forms import Codes, Form, Grid, Spec, Unread, coded_weights
from qconvert.validators.reading.model import expected_shapes
from qconvert.validators.reading.stated_schemes import Targets, gptq_weights

# Which of a word's eight rows each nibble is of, from the lowest on (AutoAWQ 0.2, `gemm`).
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def gptq_ints(
    configs: Iterable[QuantConfig], module: str | None = None
) -> tuple[PackedInts, int] | None:
    """Statements of a block of GPTQ's own form, for all modules or for one, and its version: 1 stores
    zero points minus one. None if there is none, or an invalid one."""
    config = _block(configs, "gptq")
    if config is None:
        return None
    weights = gptq_weights(config.block) if module is None else Targets.of(config).find(module)
    version = {"gptq": 1, "gptq_v2": 2}.get(config.block.get("checkpoint_format", "gptq"))
    found = None if weights is None else packed_ints(weights)
    if found is None or version is None or found.bits == 2:
        return None
    return found, version


def awq_ints(configs: Iterable[QuantConfig]) -> PackedInts | None:
    """Statements of a block of AutoAWQ's own form; None if there is none, or one that is not read
    here."""
    config = _block(configs, "awq")
    if config is None:
        return None
    block = config.block
    bits, size = (
        block.get("bits", block.get("w_bit")),
        block.get("group_size", block.get("q_group_size")),
    )
    if bits != 4 or type(size) is not int or str(block.get("version", "gemm")).lower() != "gemm":
        return None
    group = None if size == -1 else size
    return PackedInts(4, group, block.get("zero_point", True) is False, ordered=False)


def _block(configs: Iterable[QuantConfig], method: str) -> QuantConfig | None:
    return next((config for config in configs if config.method == method), None)


def _stored(checkpoint: Checkpoint, name: str) -> bool:
    return name.endswith(".qweight")


def _sizes(kind: TensorType, stated: PackedInts, *, awq: bool) -> tuple[int, int]:
    """Rows and columns of the matrix, which is stored by columns."""
    word = 32 // stated.bits
    first, last = kind.shape
    return (last * word, first) if awq else (last, first * word)


def _parts(kind: TensorType, stated: PackedInts, *, awq: bool) -> tuple[Part, ...]:
    rows, columns = _sizes(kind, stated, awq=awq)
    groups = stated.groups(columns)
    zeros, scales = (groups, ceil_div(rows, 32 // stated.bits)), (groups, rows)
    if awq:
        return (
            Part("qzeros", ("I32",), zeros, not stated.symmetric, "zero_point"),
            Part("scales", INT_SCALES, scales),
        )
    return (
        Part("qzeros", ("I32",), zeros),
        Part("scales", INT_SCALES, scales),
        Part("g_idx", INDEX, (columns,), stated.ordered),
    )


def _faults(checkpoint: Checkpoint, name: str) -> Iterator[Finding]:
    configs, kind = checkpoint.quantization_configs, checkpoint[name].type
    awq, config = awq_ints(configs), _block(configs, "gptq")
    stated = awq
    if stated is None and config is not None:
        own = gptq_ints(configs, name.removesuffix(".qweight"))
        if gptq_ints(configs) is None:
            yield from _invalid(checkpoint, config, name)
            return
        if own is None:
            message = (
                "a rule of `dynamic` covers it: expected bits 4 or 8 and a group_size (-1: a row)"
            )
            yield Finding("QC089", "error", name, message)
            return
        stated = own[0]
    if stated is None:
        return  # QC012, QC097
    if len(kind.shape) != 2:
        shape = "[K, N / 8]" if awq else "[K / word, N]"
        yield Finding("QC089", "error", name, f"expected I32 {shape}, found {kind}")
        return
    place = checkpoint.role_index.places.get(name)
    role = "" if place is None else place.role.name.removeprefix("mtp.")
    sizes = expected_shapes(checkpoint).get(role, ())
    if len(sizes) == 2 and min(sizes) > 0:
        rows, columns = sizes
        wanted = (columns, ceil_div(rows, 8)) if awq else (columns * stated.bits // 32, rows)
        if kind.shape != wanted:
            yield from unlike(checkpoint[name], ("I32",), wanted, stated)
            return
    parts = _parts(kind, stated, awq=awq is not None)
    yield from part_faults(checkpoint, name, stated, parts)


def _invalid(checkpoint: Checkpoint, config: QuantConfig, name: str) -> Iterator[Finding]:
    """Of a block that states no form that is read here: one finding, at its first matrix."""
    if name != next(one for one, spec in coded_weights(checkpoint).items() if spec is SPEC):
        return
    keys = ("bits", "group_size", "checkpoint_format")
    said = ", ".join(f"{key} {config.block.get(key)!r}" for key in keys)
    message = (
        f"expected bits 4 or 8, a group_size (-1: a row) and checkpoint_format gptq or gptq_v2, "
        f"found {said}"
    )
    yield Finding("QC089", "error", config.where, message)


def _read(checkpoint: Checkpoint, name: str) -> Form:
    module, words = name.removesuffix(".qweight"), checkpoint[name]
    zeros, scale, order = (checkpoint.get(f"{module}.{p}") for p in ("qzeros", "scales", "g_idx"))
    awq, less = awq_ints(checkpoint.quantization_configs), 0
    stated = awq
    if stated is None:
        found = gptq_ints(checkpoint.quantization_configs, module)
        if found is None:
            raise Unread("the config states no form of GPTQ weights that is read here")
        stated, less = found[0], 2 - found[1]
    if len(words.type.shape) != 2:
        raise Unread(f"packed as {words.type}")
    rows, columns = _sizes(words.type, stated, awq=awq is not None)
    parts = _parts(words.type, stated, awq=awq is not None)
    groups = checked(stated, columns, part_faults(checkpoint, name, stated, parts))
    assert scale is not None
    grid = Grid(scale, 0, rows, groups, (1, columns // groups), transposed=True)
    order = order if stated.ordered else None
    codes = Codes(
        stated.bits,
        stated.symmetric,
        zeros,
        less,
        order,
        row_order=() if awq is None else AWQ_ORDER,
    )
    form = f"w{stated.bits}a16"
    return Form(form, words, 0, rows, columns, grid, transposed=True, codes=codes)


SPEC = Spec(
    name="qweight",
    dtypes=("I32",),
    stored=_stored,
    read=_read,
    faults=_faults,
    encodings=(),
    parts=("scales", "qzeros"),
    methods=("gptq", "awq"),
)
