"""An evaluation as one page in the house style, that needs no network and runs no script."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from qconvert.core.shown import count, printable, shortened
from qconvert.evaluate.result import Evaluation
from qconvert.validation.findings import Table
from qconvert.validation.reports import markup

# An evaluation as lines of at most 60 columns.

WIDTH = 60
_LABEL = 26
_MOST_LAYERS = 24  # shown of a deep model: as many, evenly chosen, the last among them


def as_text(found: Evaluation) -> str:
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


_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 220, 64, 28


def as_html(found: Evaluation) -> str:
    """Figures of the logits, a plot of the errors by layer and their table, notes."""
    body = [*_top(found), _figures(found), _by_layer(found.hidden)]
    if found.notes:
        items = "".join(f"<li>{markup.text(note)}</li>" for note in found.notes)
        body.append(markup.section("Notes", f"<ul>{items}</ul>"))
    return markup.document(f"Evaluation: {Path(found.folder).name}", body)


def _top(found: Evaluation) -> Iterator[str]:
    about = {
        "folder": found.folder,
        "against": found.against,
        "model": found.model,
        "data": f"{found.data}: {count(found.samples, 'sample')} of at most "
        f"{count(found.length, 'token')}, {count(found.tokens, 'token')} in all, seed {found.seed}",
        "digest of data and tokenizer": found.digest,
    }
    yield '<header class="told">\n<h1>Evaluation</h1>\n<dl>'
    yield from (f"<dt>{markup.text(k)}</dt><dd>{markup.text(v)}</dd>" for k, v in about.items())
    yield "</dl>\n</header>"


def _figures(found: Evaluation) -> str:
    rows = tuple(figures(found))
    return markup.section(
        "What the conversion cost",
        '<p class="quiet">KL(source || model) is 0 where both predict the same, and is measured in '
        "nats: the mean over all tokens that are followed by one, with its standard error over samples. "
        "<b>same first choice</b> is the part of tokens after which both prefer the same one.</p>",
        markup.table(Table("", ("figure", "value"), rows)),
    )


def _by_layer(hidden: Sequence[float]) -> str:
    rows = tuple((str(number), f"{error:.4g}") for number, error in enumerate(hidden))
    return markup.section(
        f'Hidden states, layer by layer <span class="quiet">{count(len(hidden), "layer")}</span>',
        '<p class="quiet">The norm of the difference over the norm of the source\'s, after each layer; '
        "the mean over tokens.</p>",
        _plot(hidden),
        markup.table(Table("", ("layer", "relative error"), rows)),
    )


def _plot(hidden: Sequence[float]) -> str:
    """Bars, with the largest error as the height."""
    most = max(hidden) or 1.0
    inner, step = _HEIGHT - _BOTTOM - 16, (_WIDTH - _LEFT) / len(hidden)
    bars = []
    for number, error in enumerate(hidden):
        height = inner * error / most
        bars.append(
            f'<rect x="{_LEFT + step * (number + 0.1):.1f}" y="{16 + inner - height:.1f}" '
            f'width="{step * 0.8:.1f}" height="{height:.1f}" fill="currentColor">'
            f"<title>layer {number}: {error:.4g}</title></rect>"
        )
    base = 16 + inner
    labels: list[tuple[float, int, str, str]] = [
        (_LEFT - 6, 20, "end", f"{most:.3g}"),
        (_LEFT - 6, base, "end", "0"),
        (_LEFT + step / 2, base + 18, "middle", "0"),
    ]
    if len(hidden) > 1:
        labels.append((_WIDTH - step / 2, base + 18, "middle", str(len(hidden) - 1)))
    texts = "".join(
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="12" '
        f'fill="currentColor">{text}</text>'
        for x, y, anchor, text in labels
    )
    return (
        f'<div class="wide"><svg class="quiet" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" role="img" aria-label="Relative error of hidden states by layer">'
        f'<line x1="{_LEFT}" y1="{base}" x2="{_WIDTH}" y2="{base}" stroke="currentColor"/>'
        f"{''.join(bars)}{texts}</svg></div>"
    )
