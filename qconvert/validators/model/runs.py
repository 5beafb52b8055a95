"""Two runs of a model on the same tokens, and the distance between them.

Not a validator itself: it has no `VALIDATOR`, so discovery skips it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

from qconvert.validation.findings import Table
from qconvert.validators.model.served import Format

if TYPE_CHECKING:
    import torch

# Equal weights under two classes may be added in another order. The bound is the effect of float32
# instead of bf16: on a block 0.005 to 0.11 of its output (a router's near ties change), on
# hidden states 0.45 and on KL 0.22 of the distance between tokens, measured on 2 to 12 layers. Rows in
# another order: a block 1.0 to 1.5, the others as much.
_BLOCK_SUMS, _SUMS, _KL_SUMS = 0.2, 0.6, 0.5
# The allowed error of a block, relative to its output, for weights in these formats. Measured on models
# of 2 to 8 layers, weights gaussian, student-t of 4 and 3 degrees of freedom, and with outlier channels:
# AMXINT8 0.011 to 0.056, packed INT4 0.16 to 0.56, AMXINT4 0.19 to 0.70. Experts in another order: 1.2
# to 2.5 by themselves, and as little as 0.6 with shared ones, which is why routed experts are a block
# too.
_ROUNDED: Mapping[Format, float] = {
    "fp8": 0.2,
    "amxint8": 0.2,
    "int4": 0.9,
    "int8": 0.2,
    "amxint4": 0.9,
}
PARTS = ("attention", "experts", "mlp")


class Block(NamedTuple):
    """One of PARTS of a layer: attention, linear or not; routed experts, if it has them; the MLP,
    which contains these and shared ones."""

    layer: int
    part: str


@dataclass(frozen=True, slots=True)
class Digest:
    """A tensor as the class took it: its type, the form it was stored in, and a hash of its bytes."""

    type: str
    format: Format
    hash: str


@dataclass(frozen=True)
class Run:
    """What a model made of some tokens: `logits` [T, V], `hidden` states [T, H] after each layer, and
    each block's `outputs` [T, H], float32; `inputs` are what blocks were given. `kind` is the model's
    class."""

    kind: str
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    inputs: Mapping[Block, torch.Tensor]
    outputs: Mapping[Block, torch.Tensor]
    digests: Mapping[str, Digest]

    @property
    def finite(self) -> bool:
        return bool(self.logits.isfinite().all())


@dataclass(frozen=True, slots=True)
class Figure:
    """Something measured from source to output. `baseline` is the same from one token to the next in the
    source, `allowed` the most it may be (None: any number)."""

    what: str
    found: float
    baseline: float | None = None
    allowed: float | None = None

    @property
    def fits(self) -> bool:
        return isfinite(self.found) and (self.allowed is None or self.found <= self.allowed)


@dataclass(frozen=True)
class Comparison:
    """Figures of each layer, by part and of its `result`, then of the logits. `differing` are tensors
    that should be equal but are not, of the `common` ones that should be."""

    kind: str
    by_layer: Sequence[Mapping[str, Figure]]
    logits: Sequence[Figure]
    differing: Sequence[str]
    common: int

    def fault(self) -> str | None:
        """What is wrong, in words; None if nothing is."""
        told = []
        figures = [*(figure for layer in self.by_layer for figure in layer.values()), *self.logits]
        wrong = next((figure for figure in figures if not figure.fits), None)
        if wrong is not None:
            most = "a number" if wrong.allowed is None else f"at most {wrong.allowed:.3g}"
            told.append(f"{wrong.what}: expected {most}, found {wrong.found:.3g}")
        if self.differing:
            told.append(
                f"{len(self.differing)} of {self.common} tensors that no format rounds differ from the "
                f"source's, as the class takes them; first {self.differing[0]}"
            )
        return "; ".join(told) or None

    def tables(self, title: str) -> Iterator[Table]:
        yield Table(
            f"logits of {title}",
            ("figure", "source to output", "at most", "token to token"),
            tuple((f.what, _n(f.found), _n(f.allowed), _n(f.baseline)) for f in self.logits),
            "token to token: the same between the source's own logits of one token and of the next",
        )
        shown = (*PARTS, "result")
        yield Table(
            f"layers of {title}",
            ("layer", *(text for part in shown for text in (part, "at most")), "token to token"),
            tuple(
                (
                    str(number),
                    *(
                        text
                        for part in shown
                        for text in (
                            (_n(layer[part].found), _n(layer[part].allowed))
                            if part in layer
                            else ("", "")
                        )
                    ),
                    _n(layer["result"].baseline),
                )
                for number, layer in enumerate(self.by_layer)
            ),
            "norm of the difference over norm; all but results are given the source's own inputs: "
            "errors of earlier layers are only in the result",
        )


def _n(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def compare(source: Run, output: Run) -> Comparison:
    """`output`'s blocks must have been given `source`'s inputs."""
    by_layer = []
    exact = True
    for number, (a, b) in enumerate(zip(source.hidden, output.hidden, strict=True)):
        figures = {}
        for part in PARTS:
            where = Block(number, part)
            if where not in source.outputs:
                continue
            rounded = _new_formats(where, source, output)
            exact = exact and not rounded
            most = max((_ROUNDED[form] for form in rounded), default=_BLOCK_SUMS)
            off = relative(source.outputs[where], output.outputs[where])
            what = f"layer {number}'s {part}, given the source's input"
            figures[part] = Figure(what, off, None, most)
        baseline = relative(a, a.roll(1, 0))
        most_states = _SUMS * baseline if exact else None
        figures["result"] = Figure(
            f"layer {number}'s result", relative(a, b), baseline, most_states
        )
        by_layer.append(figures)
    should = [
        (name, digest, source.digests[name])
        for name, digest in output.digests.items()
        if name in source.digests
        and digest.format in ("bf16", source.digests[name].format)
        and digest.type
        == source.digests[name].type  # another dtype may still be the same to a class
    ]
    differing = [name for name, ours, theirs in should if ours.hash != theirs.hash]
    kind = source.kind if source.kind == output.kind else f"{source.kind} and {output.kind}"
    logits = _logits(source.logits, output.logits, exact=exact)
    return Comparison(kind, by_layer, logits, differing, len(should))


def _new_formats(where: Block, source: Run, output: Run) -> set[Format]:
    """Quantized forms of a block's weights that the source does not have."""
    theirs, ours = (
        {digest.format for name, digest in run.digests.items() if where in blocks_of(name)}
        for run in (source, output)
    )
    return ours - theirs - {"bf16"}


def blocks_of(name: str) -> tuple[Block, ...]:
    """The blocks that a tensor of the class belongs to; none for norms, embeddings and the head."""
    _, _, rest = name.partition("model.layers.")
    number, _, inner = rest.partition(".")
    if not number.isdecimal():
        return ()
    if inner.startswith(("self_attn.", "linear_attn.")):
        return (Block(int(number), "attention"),)
    parts = [
        part for part, at in (("experts", "mlp.experts."), ("mlp", "mlp.")) if inner.startswith(at)
    ]
    return tuple(Block(int(number), part) for part in parts)


def _logits(a: torch.Tensor, b: torch.Tensor, *, exact: bool) -> list[Figure]:
    other = a.roll(1, 0)
    baseline = kl(a, other)
    worst, apart = (float((a - x).abs().max()) for x in (b, other))
    agree, by_chance = (float((a.argmax(1) == x.argmax(1)).double().mean()) for x in (b, other))
    return [
        Figure(
            "mean KL(source || output), nats",
            kl(a, b),
            baseline,
            _KL_SUMS * baseline if exact else None,
        ),
        Figure("max |dlogit|", worst, apart),
        Figure("top-1 agreement", agree, by_chance),
    ]


def relative(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Norm of the difference over norm: 0 if equal, NaN if anything is not finite."""
    off = float((found.double() - expected.double()).norm())
    size = float(expected.double().norm())
    return 0.0 if off == 0 else off / size if size else float("inf")


def kl(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Mean over tokens of KL(expected || found), in nats; rounding never takes it below 0."""
    p, q = (x.double().log_softmax(1) for x in (expected, found))
    return float((p.exp() * (p - q)).sum(1).mean().clamp_min(0))
