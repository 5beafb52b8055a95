"""Reports of an evaluation: lines of a terminal, or one page in the house style, which needs no network
and runs no script.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from qconvert.core.shown import count, format_size, printable, shortened
from qconvert.evaluate.paired import Differences
from qconvert.evaluate.result import Evaluation
from qconvert.evaluate.task import Accuracy
from qconvert.validation.findings import Table
from qconvert.validation.reports import markup

WIDTH = 60
_LABEL = 28
_MOST_LAYERS = 24  # shown of a deep model: as many, evenly chosen, the last among them


def as_text(found: Evaluation) -> str:
    """A table of figures, a bar for each layer's error, notes. Of several folders first what they are
    apart."""
    return "\n".join(_lines(found))


def _lines(found: Evaluation) -> Iterator[str]:
    for other in found.beside:
        if other.differences is not None:
            yield from _compared(found.folder, other.folder, other.differences)
            yield from _sizes(found, other)
            yield ""
    for number, one in enumerate((found, *found.beside)):
        if number:
            yield ""
        yield from _folder_lines(one)
    for note in found.notes:
        yield ""
        yield from textwrap.wrap(f"note: {printable(note)}", WIDTH)


def _compared(first: str, second: str, apart: Differences) -> Iterator[str]:
    yield from textwrap.wrap(
        verdict(first, second, apart), WIDTH, break_long_words=False, break_on_hyphens=False
    )
    yield f"{'second minus first':<{_LABEL}}{'mean':>10}{'std. err.':>10}{'in errors':>11}"
    for label, *values in differences(apart):
        yield f"{label:<{_LABEL}}{values[0]:>10}{values[1]:>10}{values[2]:>11}"
    if apart.changed is not None:
        yield f"{'questions answered otherwise':<{_LABEL}}{apart.changed:>10,}"


def _sizes(first: Evaluation, second: Evaluation) -> Iterator[str]:
    """Bytes of both folders' tensors where they differ: what is larger may well be better."""
    if first.nbytes and second.nbytes and first.nbytes != second.nbytes:
        sizes = f"{format_size(first.nbytes)}, {format_size(second.nbytes)}"
        yield f"{'bytes of tensors':<{_LABEL}} {sizes:>{WIDTH - _LABEL - 1}}"


def verdict(first: str, second: str, apart: Differences) -> str:
    """Return which of two folders loses less, or that the data do not say so."""
    names = [shortened(printable(name), 200) for name in (first, second)]
    if apart.kl.errors is None:
        what = "no standard error of the difference, with one sample" if apart.kl.error is None else (
            "the same KL divergence in every sample"
        )  # fmt: skip
        return f"{names[0]} and {names[1]}: {what}"
    by = f"({abs(apart.kl.errors):.1f} standard errors)"
    if apart.better is None:
        return (
            f"{names[0]} and {names[1]}: KL divergences differ by no more than chance makes {by}; give "
            "more --samples"
        )
    best, other = names[::-1] if apart.better else names
    return f"{best} is better than {other}: less KL divergence {by}"


def differences(apart: Differences) -> Iterator[tuple[str, str, str, str]]:
    """Return the name of each figure, the mean of its difference, the standard error of that, and how
    many of these it is."""
    for label, form, one in (
        ("KL, nats a token", ".2g", apart.kl),
        ("log perplexity", ".2g", apart.loss),
        ("same first choice", ".2%", apart.agreement),
        ("accuracy", ".2%", apart.accuracy),
        ("accuracy by length", ".2%", apart.by_length),
    ):
        if one is not None:
            error = "unknown" if one.error is None else f"{one.error:{form}}"
            errors = "unknown" if one.errors is None else f"{one.errors:.1f}"
            yield label, f"{one.mean:+{form}}", error, errors


def _folder_lines(found: Evaluation) -> Iterator[str]:
    yield from named("model", found.folder)
    yield from named("source", found.against)
    yield from named(
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
    if (task := found.task) is not None:
        yield "questions", f"{task.questions:,}"
        yield from _accuracy("accuracy", task.accuracy)
        if task.by_length is not None:
            yield from _accuracy("accuracy by length", task.by_length)
        yield "questions answered otherwise", f"{task.changed:,}"


def _accuracy(label: str, found: Accuracy) -> Iterator[tuple[str, str]]:
    rows = (
        (label, found.repo, found.repo_error, ".2%"),
        (f"{label}, source", found.source, found.source_error, ".2%"),
        (f"{label}, change", found.difference, found.difference_error, "+.2%"),
    )
    for name, value, error, form in rows:
        yield name, f"{value:{form}}" + ("" if error is None else f" +- {error:.2%}")


def layers_shown(count: int) -> list[int]:
    """Numbers of the layers to show: all, or some evenly apart and the last."""
    if count <= _MOST_LAYERS:
        return list(range(count))
    return sorted({round(n * (count - 1) / (_MOST_LAYERS - 1)) for n in range(_MOST_LAYERS)})


def named(label: str, value: str) -> Iterator[str]:
    lines = textwrap.wrap(shortened(printable(value), 200), WIDTH - 8) or [""]
    for number, line in enumerate(lines):
        yield f"{'' if number else label:<8}{line}"


_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 220, 64, 28


# As a page: what it lost in large figures first, of several folders side by side.


def as_html(found: Evaluation) -> str:
    """Large figures, then all of them, a plot of the errors by layer and their table, notes. Of several
    folders also what they are apart."""
    every = (found, *found.beside)
    body = [*_top(every), *_differences(found), _figures(every)]
    body += [_by_layer(one, len(every) > 1) for one in every]
    if found.notes:
        items = "".join(f"<li>{markup.text(note)}</li>" for note in found.notes)
        body.append(markup.section("Notes", f"<ul>{items}</ul>"))
    return markup.document(" and ".join(map(_title, every)), body)


def _title(found: Evaluation) -> str:
    return Path(found.folder).name


def _top(every: Sequence[Evaluation]) -> Iterator[str]:
    found = every[0]
    about = {
        "folder": ", ".join(one.folder for one in every),
        "against": found.against,
        "model": found.model,
        "data": f"{found.data}: {count(found.samples, 'sample')} of at most "
        f"{count(found.length, 'token')}, {count(found.tokens, 'token')} in all, seed {found.seed}",
        "digest of data and tokenizer": found.digest,
    }
    yield '<header class="told">'
    if len(every) == 1:
        yield f"<h1>{markup.text(_title(found))}</h1>\n{_large(found)}"
    else:
        yield "<h1>What conversions cost</h1>"
        apart = [(one, one.differences) for one in every if one.differences is not None]
        yield from (
            f'<p class="tally">{markup.text(verdict(found.folder, one.folder, what))}</p>'
            for one, what in apart
        )
        boxes = (
            f'<div class="box"><b>{markup.text(_title(one))}</b>{_large(one)}</div>'
            for one in every
        )
        yield f'<div class="pair">{"".join(boxes)}</div>'
    yield "<dl>"
    yield from (f"<dt>{markup.text(k)}</dt><dd>{markup.text(v)}</dd>" for k, v in about.items())
    yield "</dl>\n</header>"


def _large(found: Evaluation) -> str:
    """The figures that people quote."""
    logits = found.logits
    shown = [("hidden states, relative error", f"{found.hidden[-1]:.2g}")]
    if logits is not None:
        change = logits.perplexity / logits.source_perplexity - 1
        shown = [
            ("same first choice", f"{logits.agreement:.2%}"),
            ("KL divergence, nats", f"{logits.kl:.3g}"),
            ("perplexity", f"{change:+.2%}"),
        ]
    if found.smaller is not None:
        factor, word = max((found.smaller, "smaller"), (1 / found.smaller, "larger"))
        shown.append((f"{word} than the source", f"{factor:.1f} x"))
    return markup.large(shown)


def _differences(found: Evaluation) -> Iterator[str]:
    for other in found.beside:
        if (apart := other.differences) is None:
            continue
        yield markup.section(
            f"{markup.text(other.folder)} minus {markup.text(found.folder)}",
            markup.table(
                Table(
                    "",
                    ("figure", "mean", "standard error", "standard errors"),
                    tuple(differences(apart)),
                )
            ),
        )


def _figures(every: Sequence[Evaluation]) -> str:
    names = ("value",) if len(every) == 1 else tuple(one.folder for one in every)
    columns = [tuple(figures(one)) for one in every]
    rows = tuple((row[0][0], *(value for _, value in row)) for row in zip(*columns, strict=True))
    return markup.section(
        "What the conversion cost",
        '<p class="quiet">KL(source || model) is 0 where both predict the same, and is measured in '
        "nats: the mean over all tokens that are followed by one, with its standard error over samples. "
        "<b>same first choice</b> is the part of tokens after which both prefer the same one.</p>",
        markup.table(Table("", ("figure", *names), rows)),
    )


def _by_layer(found: Evaluation, named: bool) -> str:
    hidden, of = found.hidden, f" of {markup.text(found.folder)}" if named else ""
    rows = tuple((str(number), f"{error:.4g}") for number, error in enumerate(hidden))
    return markup.section(
        f'Hidden states{of}, layer by layer <span class="quiet">{count(len(hidden), "layer")}</span>',
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
