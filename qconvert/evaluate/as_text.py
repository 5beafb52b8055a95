"""An evaluation as lines of at most 60 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from qconvert.core.shown import count, printable, shortened
from qconvert.evaluate.result import Evaluation

WIDTH = 60
_LABEL = 26
_MOST_LAYERS = 24  # shown of a deep model: as many, evenly chosen, the last among them


def render(found: Evaluation) -> str:
    """A table of figures, a bar for each layer's error, notes."""
    return "\n".join(_lines(found))


def _lines(found: Evaluation) -> Iterator[str]:
    yield from _named("model", found.folder)
    yield from _named("source", found.against)
    yield from _named(
        "data",
        f"{found.data}, {count(found.samples, 'sample')}, {count(found.tokens, 'token')}",
    )
    yield ""
    for label, value in figures(found):
        yield f"{label:<{_LABEL}} {value:>{WIDTH - _LABEL - 1}}"
    yield ""
    yield "relative error of hidden states, by layer"
    most = max(found.hidden) or 1.0
    for number in layers_shown(len(found.hidden)):
        error = found.hidden[number]
        bar = "#" * round((WIDTH - 18) * error / most)
        yield f"{number:>5}  {error:<10.3g} {bar}".rstrip()
    for note in found.notes:
        yield ""
        yield from textwrap.wrap(f"note: {printable(note)}", WIDTH)


def figures(found: Evaluation) -> Iterator[tuple[str, str]]:
    """Return what is said of the logits, a label and a figure each."""
    logits = found.logits
    if logits is None:
        yield "layers run", f"{found.layers} of {found.of_layers}"
        return
    yield "perplexity", f"{logits.perplexity:.5g}"
    yield "perplexity of the source", f"{logits.source_perplexity:.5g}"
    ratio = logits.perplexity / logits.source_perplexity - 1
    yield "perplexity, change", f"{ratio:+.3%}"
    yield "KL(source || model)", f"{logits.kl:.4g} nats a token"
    error = "unknown: one sample" if logits.kl_error is None else f"{logits.kl_error:.2g}"
    yield "KL, standard error", error
    yield "same first choice", f"{logits.agreement:.3%}"
    yield "tokens predicted", f"{logits.predicted:,}"


def layers_shown(count: int) -> list[int]:
    """Numbers of the layers to show: all, or some evenly apart and the last."""
    if count <= _MOST_LAYERS:
        return list(range(count))
    return sorted({round(n * (count - 1) / (_MOST_LAYERS - 1)) for n in range(_MOST_LAYERS)})


def _named(label: str, value: str) -> Iterator[str]:
    lines = textwrap.wrap(shortened(printable(value), 200), WIDTH - 8) or [""]
    for number, line in enumerate(lines):
        yield f"{'' if number else label:<8}{line}"
