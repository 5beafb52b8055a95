"""Packed integers in the own forms of GPTQ (AutoGPTQ 0.7, GPTQModel; read by sglang and vLLM) and of
AutoAWQ (0.2, version gemm; vLLM `awq.py`, sglang `awq/`), of matrices [K, N].

GPTQ: `qweight` I32 [K * bits / 32, N], `qzeros` I32 [groups, N * bits / 32], `scales` [groups, N],
`g_idx` I32 [K], which consumers read only if the config says desc_act. AutoRound (0.15) stores one of
these forms, without g_idx. AWQ: `qweight` I32 [K, N / 8], `qzeros` I32
[groups, N / 8], `scales` [groups, N].

QC089 packed integers have a type or shape that the config's bits and group size do not give.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

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
from qconvert.validators.reading.forms import (
    Codes,
    Form,
    Grid,
    Spec,
    Unread,
    Weights,
    coded_weights,
    words_of,
)
from qconvert.validators.reading.model import expected_shapes
from qconvert.validators.reading.quantization import Block, blocks
from qconvert.validators.reading.stated_schemes import (
    AUTO_ROUND,
    auto_round_form,
    awq_weights,
    gptq_weights,
)

METHODS = ("gptq", "awq", AUTO_ROUND)

# Which of a word's eight rows each nibble is of, from the lowest on (AutoAWQ 0.2, `gemm`).
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


_VERSIONS = {"gptq": 1, "gptq_v2": 2}


@lru_cache(maxsize=8)  # called for each matrix
def qweight_block(checkpoint: Checkpoint) -> Block | None:
    """The block that states a form of `qweight`, None without one."""
    return next((b for b in blocks(checkpoint) if b.config.method in METHODS), None)


def version_of(config: QuantConfig) -> int | None:
    """The version of GPTQ's own form: 1 stores zero points minus one; 0 is AutoAWQ's. None for one that
    is not read here."""
    if config.method == "awq":
        return 0 if str(config.block.get("version", "gemm")).lower() == "gemm" else None
    if config.method == AUTO_ROUND:
        return {**_VERSIONS, "awq": 0}.get(auto_round_form(config.block))
    return _VERSIONS.get(str(config.block.get("checkpoint_format", "gptq")))


def qweight_ints(checkpoint: Checkpoint, module: str) -> tuple[PackedInts, int] | None:
    """Statements about a module's `qweight`, and the version of its form. None if there are none, or
    invalid ones."""
    block = qweight_block(checkpoint)
    version = None if block is None else version_of(block.config)
    if block is None or version is None:
        return None
    if block.config.method == "awq":
        weights: Weights | None = awq_weights(block.config.block)
    else:
        weights = block.targets.find(module)
    found = None if weights is None else packed_ints(weights)
    if found is None or (version == 0 and found.bits != 4):
        return None
    return found, version


def states_qweight(config: QuantConfig) -> bool:
    """Tell whether a block, its rules for modules apart, states a form of `qweight` that is read."""
    version, block = version_of(config), config.block
    weights = awq_weights(block) if config.method == "awq" else gptq_weights(block)
    found = packed_ints(weights)
    return version is not None and found is not None and (version > 0 or found.bits == 4)


def _stored(checkpoint: Checkpoint, name: str) -> bool:
    return name.endswith(".qweight")


def _sizes(kind: TensorType, stated: PackedInts, *, awq: bool) -> tuple[int, int]:
    """Rows and columns of the matrix, which is stored by columns."""
    first, last = kind.shape
    return (last * 8, first) if awq else (last, first * 32 // stated.bits)


def _parts(
    checkpoint: Checkpoint, kind: TensorType, stated: PackedInts, *, awq: bool
) -> tuple[Part, ...]:
    """AutoRound stores AutoAWQ's zero points of symmetric weights, too."""
    block = qweight_block(checkpoint)
    key = "zero_point" if block is not None and block.config.method == "awq" else ""
    rows, columns = _sizes(kind, stated, awq=awq)
    groups = stated.groups(columns)
    zeros, scales = (groups, words_of(rows, stated.bits)), (groups, rows)
    if awq:
        return (
            Part("qzeros", ("I32",), zeros, not stated.symmetric, key),
            Part("scales", INT_SCALES, scales),
        )
    return (
        Part("qzeros", ("I32",), zeros),
        Part("scales", INT_SCALES, scales),
        Part("g_idx", INDEX, (columns,), stated.ordered),
    )


def _faults(checkpoint: Checkpoint, name: str) -> Iterator[Finding]:
    kind, module, block = (
        checkpoint[name].type,
        name.removesuffix(".qweight"),
        qweight_block(checkpoint),
    )
    if block is None or block.left.names(module):
        return  # QC012, QC034
    found = qweight_ints(checkpoint, module)
    if found is None and block.config.method == "awq":
        return  # QC097
    if found is None and not states_qweight(block.config):
        yield from _invalid(checkpoint, block.config, name)
        return
    if found is None:
        where = "of `dynamic`" if block.config.method == "gptq" else "of extra_config"
        message = (
            f"a rule {where} covers it: expected bits from 2 to 8 and a group_size (-1: a row)"
        )
        yield Finding("QC089", "error", name, message)
        return
    stated, awq = found[0], found[1] == 0
    if len(kind.shape) != 2:
        shape = "[K, N / 8]" if awq else "[K / word, N]"
        yield Finding("QC089", "error", name, f"expected I32 {shape}, found {kind}")
        return
    place = checkpoint.role_index.places.get(name)
    role = "" if place is None else place.role.name.removeprefix("mtp.")
    sizes = expected_shapes(checkpoint).get(role, ())
    if len(sizes) == 2 and min(sizes) > 0:
        rows, columns = sizes
        wanted = (columns, ceil_div(rows, 8)) if awq else (words_of(columns, stated.bits), rows)
        if kind.shape != wanted:
            yield from unlike(checkpoint[name], ("I32",), wanted, stated)
            return
    parts = _parts(checkpoint, kind, stated, awq=awq)
    yield from part_faults(checkpoint, name, stated, parts)


def _invalid(checkpoint: Checkpoint, config: QuantConfig, name: str) -> Iterator[Finding]:
    """Of a block that states no form that is read here: one finding, at its first matrix."""
    if name != next(one for one, spec in coded_weights(checkpoint).items() if spec is SPEC):
        return
    keys, forms = ("bits", "group_size", "checkpoint_format"), "gptq or gptq_v2"
    if config.method == AUTO_ROUND:
        keys, forms = (*keys[:2], "packing_format"), "auto_round:auto_gptq, gptqmodel or auto_awq"
    said = ", ".join(f"{key} {config.block.get(key)!r}" for key in keys)
    message = (
        f"expected bits from 2 to 8, a group_size (-1: a row) and {keys[-1]} {forms}, found {said}"
    )
    yield Finding("QC089", "error", config.where, message)


def _read(checkpoint: Checkpoint, name: str) -> Form:
    module, words = name.removesuffix(".qweight"), checkpoint[name]
    zeros, scale, order = (checkpoint.get(f"{module}.{p}") for p in ("qzeros", "scales", "g_idx"))
    found = qweight_ints(checkpoint, module)
    if found is None:
        raise Unread("the config states no form of GPTQ's or AutoAWQ's weights that is read here")
    stated, awq, less = found[0], found[1] == 0, 1 if found[1] == 1 else 0
    if len(words.type.shape) != 2:
        raise Unread(f"packed as {words.type}")
    rows, columns = _sizes(words.type, stated, awq=awq)
    parts = _parts(checkpoint, words.type, stated, awq=awq)
    groups = checked(stated, columns, part_faults(checkpoint, name, stated, parts))
    assert scale is not None
    grid = Grid(scale, 0, rows, groups, (1, columns // groups), transposed=True)
    order = order if stated.ordered else None
    turned = AWQ_ORDER if awq else ()
    codes = Codes(stated.bits, stated.symmetric, zeros, less, order, row_order=turned)
    form = "w4a16" if awq else stated.encoding(columns)
    return Form(form, words, 0, rows, columns, grid, transposed=True, codes=codes)


SPEC = Spec(
    name="qweight",
    dtypes=("I32",),
    stored=_stored,
    read=_read,
    faults=_faults,
    encodings=(),
    parts=("scales", "qzeros"),
    methods=METHODS,
)
