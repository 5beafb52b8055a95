"""Where the error of an output comes from: for some layers, how much of it each cause makes.

QC082 a block's output has little to do with the result of the source's weights.

The block is a layer's experts, routed and shared, or its dense MLP. The truth is the source's weights in
float32. Against it stand, each alone and all together: routed experts' weights as this folder stores
them (expert codes); activations rounded to int8 before each matrix, per token, as KTransformers' AMX
kernels do (each NUMA node rounds its part of down's input by itself); and FP8 linears, whose
activations runtimes round to E4M3 in groups of as many columns as a block has (a token at a time where
there are no blocks), shared experts' and dense weights included, where they are not the source's.
Results rounded to bf16 and attention between tokens are left out.

Attention's linear layers are not followed through attention: each is judged by its own output.

Hidden states are embeddings of random tokens under the layer's own norm, and gaussian where those cannot
be read: real ones deep in a model have larger outliers, so int8's and FP8's shares can be larger there.
Two matrices are held at a time, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

from qconvert.core.errors import PlanError
from qconvert.core.extras import lacking
from qconvert.validation.findings import Finding, Rule, Table
from qconvert.validation.runner import Folder, Need, NotChecked, Yield
from qconvert.validators.model.causes import CAUSES, Shares, attention_error, block_shares
from qconvert.validators.model.served import Model, output_model, reading, source_model

RULES = (
    Rule(
        "QC082",
        "a block's output has little to do with the result of the source's weights",
        "Experts exchanged, matrices of another layer, or scales multiplied instead of divided: "
        "rounding alone never comes near.",
        "Run --level full --against SRC: it names the matrices. Convert again.",
    ),
)

# Unrelated weights are off by 1.4, missing ones by 1. Four bits were measured at 0.7 for weights with
# far outliers, and at 0.15 to 0.5 for others.
_UNRELATED = 0.9
_BESIDE = 320 << 20  # torch, and products of a few tokens
_AT_ONCE = 24  # bytes an element of the largest matrix: twice as float32, and decoding
_SAID = 0.001  # errors below this are not mentioned

_HELP = {
    (
        "codes",
        "amxint4",
    ): "--rounding search takes a tenth to a half off AMXINT4's codes, in the same "
    "format; AMXINT8 takes off nine tenths, for twice the memory; or serve more experts from the GPU",
    (
        "codes",
        "amxint8",
    ): "AMXINT8 is the finest that the CPU's kernels take; serve more experts from the GPU",
    (
        "codes",
        "int4",
    ): "a smaller W4A16 group (its recipe's `group`), or experts left as the source has them",
    (
        "codes",
        "int8",
    ): "experts left as the source has them",
    (
        "int8",
        "",
    ): "no codes can help: the CPU's kernels round activations whatever the weights are; "
    "serve more experts from the GPU",
    ("linears", ""): "dequantize these layers (qconvert dequant), so that they run in bf16",
}


@dataclass(frozen=True)
class Attribution:
    """A table, one line per layer: the first, the middle and the last with experts, or those asked
    for."""

    name: str = "attribution"
    proves: str = (
        "what some layers' blocks compute is the source's, rounded (the table says by what)"
    )
    needs: frozenset[Need] = frozenset({"attribute", "source"})

    def __call__(self, folder: Folder) -> Iterator[Yield]:
        if missing := lacking("kernels", "torch"):
            raise NotChecked(missing)
        source, served = source_model(folder), output_model(folder)
        try:
            layers = _layers(folder, source, served)
            _check_memory(folder, served)
            lines = list(_lines(source, served, layers))
        except PlanError as error:
            raise NotChecked(str(error)) from error
        yield _table(lines)
        for line in lines:
            total = line.shares.together
            if not (isfinite(total) and total <= _UNRELATED):
                yield Finding(
                    "QC082", "error", f"layer {line.layer}",
                    f"its experts or MLP are off by {total:.3g} of their output, expected at most "
                    f"{_UNRELATED} of any rounding; the largest cause: {_largest([line])[1]}",
                )  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One layer's figures. `form` is how its experts, or its dense MLP, are stored; `attention` the
    error of its linears, None if nothing about them was rounded."""

    layer: int
    form: str
    shares: Shares
    attention: float | None


def _layers(folder: Folder, source: Model, served: Model) -> list[int]:
    """Which layers to check. Raises NotChecked."""
    for model in (source, served):
        if model.checkpoint.family.name == "generic":
            kind = model.checkpoint.config.get("model_type")
            raise NotChecked(f"model_type {kind!r} is not known here")
    activation = served.config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise NotChecked(f"expected MLPs with silu, found {activation!r}")
    if source.layers != served.layers:
        raise NotChecked(f"it has {served.layers} layers, but the source {source.layers}")
    known = set(source.prefixes) & set(served.prefixes)
    if folder.request.layers is not None:
        asked = [n for n in folder.request.layers if n in known]
        if not asked:
            raise NotChecked("none of the layers asked for exists")
        return asked
    usual = [n for n in (served.moe_layers or range(served.layers)) if n in known]
    if not usual:
        raise NotChecked("no layer is complete")
    return sorted({usual[0], usual[len(usual) // 2], usual[-1]})


def _check_memory(folder: Folder, served: Model) -> None:
    types = [t.type for t in served.checkpoint.values() if len(t.type.shape) == 2]
    dims = served.checkpoint.role_index.dims
    largest = max([dims.hidden_size * dims.moe_intermediate_size, *(t.numel for t in types)])
    need, memory = _BESIDE + _AT_ONCE * largest, folder.request.memory
    if memory is not None and need > memory:
        raise NotChecked(
            f"checking its largest matrix takes {need >> 20} MiB, torch included, more than the "
            f"memory granted; give --memory {-(-need >> 20)}MiB"
        )


def _lines(source: Model, served: Model, layers: Sequence[int]) -> Iterator[Line]:
    with reading(source) as theirs, reading(served) as ours:
        for layer in layers:
            form, shares = block_shares(theirs, ours, layer)
            yield Line(layer, form, shares, attention_error(theirs, ours, layer))


def _table(lines: Sequence[Line]) -> Table:
    rows = []
    for line in lines:
        shares = [line.shares.of[cause] for cause in CAUSES]
        figures = [*shares, line.shares.together, line.shares.remains]
        attention = "" if line.attention is None else _n(line.attention)
        rows.append((str(line.layer), line.form, *map(_n, figures), attention))
    return Table(
        "where the error of experts and MLPs comes from",
        (
            "layer", "stored as", "expert codes", "int8 activations", "FP8 linears", "together",
            "remains", "attention's linears",
        ),
        tuple(rows),
        "norm of the error over norm of the block's output; causes are unrelated, so their squares add "
        "up to that of `together`; `remains` is what they leave unexplained. Attention's linears: each "
        f"by its own output, root mean square. {_advice(lines)}",
    )  # fmt: skip


def _n(value: float) -> str:
    return "0" if value == 0 else f"{value:.3g}"


def _largest(lines: Sequence[Line]) -> tuple[float, str, str]:
    """The cause that makes most of the squares, its name, and what helps."""
    names = {"codes": "expert codes", "int8": "int8 activations", "linears": "FP8 linears"}
    sums = {c: sqrt(sum(line.shares.of[c] ** 2 for line in lines) / len(lines)) for c in CAUSES}
    cause = max(CAUSES, key=lambda c: sums[c])
    forms = [line.form for line in lines]
    helps = _HELP.get((cause, ""), "") or next(
        (_HELP[cause, form] for form in forms if (cause, form) in _HELP),
        "nothing is quantized here: the weights differ from the source's",
    )
    return sums[cause], names[cause], helps


def _advice(lines: Sequence[Line]) -> str:
    size, name, helps = _largest(lines)
    if size < _SAID:
        return "Almost nothing is lost here."
    return f"Most comes from {name}: {helps}."


VALIDATOR = Attribution()
