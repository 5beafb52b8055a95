"""eval: what a conversion cost in quality, and its report: lines, or one page in the house style that
needs no network and runs no script. ask: whether a server computes what a folder's weights say."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli.command import VERBOSITY, Command
from qconvert.cli.options import (
    FINDINGS,
    JSON,
    OPENING,
    SOURCE_NAME,
    Count,
    File,
    Parsed,
    from_options,
    option_of,
    options_of,
    report,
)
from qconvert.cli.progress import Bar
from qconvert.client.served import parse_server
from qconvert.core.links import writing
from qconvert.core.say import say, say_json, say_report
from qconvert.core.shown import count, printable, shortened
from qconvert.evaluate.paired import Differences
from qconvert.evaluate.result import Evaluation
from qconvert.evaluate.task import Accuracy
from qconvert.samples.request import Calibration, DataSpec
from qconvert.validation.findings import Table
from qconvert.validation.options import ValidateOptions
from qconvert.validation.reports import markup

if TYPE_CHECKING:
    from qconvert.evaluate.ask import Asked

_FORMS = (".html", ".json", ".txt")


@click.command(name="eval", cls=Command)
@click.argument("models", metavar="REPO...", nargs=-1, required=True, type=SOURCE_NAME)
@click.option(
    "--against", type=SOURCE_NAME, metavar="SRC", required=True,
    help="The source that the folder was made from, to compare it with.",
)  # fmt: skip
@option_of(DataSpec, "data")
@option_of(DataSpec, "synthetic", help="Random tokens instead of data. [with --first-layers]")
@click.option(
    "--task", type=File(exists=False), metavar="FILE",
    help="Questions instead of data, JSONL: rows of ARC, HellaSwag or MMLU, samples that "
    "lm-evaluation-harness logged, or `context`, `choices` and `answer`. [docs/validation.md]",
)  # fmt: skip
@option_of(DataSpec, "samples", given=True, default="64; of --task all")
@options_of(DataSpec, "length", "seed", "column", given=True)
@option_of(ValidateOptions, "pair", default="SRC")
@click.option(
    "--activations", is_flag=True,
    help="Round activations of each REPO as its config has runtimes do.",
)  # fmt: skip
@click.option(
    "--first-layers", "first_layers", type=Count(), metavar="N",
    help="Run the first N layers alone: errors of hidden states, and no perplexity.",
)  # fmt: skip
@option_of(ValidateOptions, "memory", default="three quarters of the machine's")
@option_of(Calibration, "devices")
@JSON
@report(".html .json .txt")
@click.option(
    "--write",
    is_flag=True,
    help="Note the result in each REPO's manifest and on its model card (`model-index`).",
)
@OPENING
@VERBOSITY
def evaluate(
    models: tuple[str, ...],
    against: str,
    data: str | None,
    synthetic: bool,
    task: Path | None,
    samples: int | None,
    length: int | None,
    seed: int | None,
    first_layers: int | None,
    as_json: bool,
    files: tuple[Path, ...],
    write: bool,
    **given: Any,
) -> None:
    """Measure what a conversion cost in quality.

    Perplexity of REPO and of SRC, KL divergence, hidden states.

    Both models run on the same tokens, a decoder layer of each in memory at a time, as transformers
    computes them in BF16; weights in any format are decoded. With --activations what goes into a
    linear layer or an expert of REPO is rounded to FP8, INT8 or FP4 where its config says so.
    Prints the perplexities, the mean KL(SRC || REPO) a token with its standard error over samples,
    how often both prefer the same token, and the relative error of the hidden states after each
    layer. With --task also how many questions both answer right, as lm-evaluation-harness counts.
    Of several REPOs, in one run, also how far each is from the first, with standard errors of the
    differences, and which is better.

    \b
    Examples:
      qconvert eval GLM-4.5-w4a16 --against GLM-4.5 --data wiki.txt
      qconvert eval V3-cpu --against DeepSeek-V3 --pair V3-gpu --data wiki.txt --device cuda:0
      qconvert eval V3-nvfp4 --against DeepSeek-V3 --data chats.jsonl --samples 16 --memory 48GiB
      qconvert eval Qwen3-w4a16 --against Qwen3 --data wiki.txt --report page.html --write
      qconvert eval Qwen3-w4a16 --against Qwen3 --task arc_easy.jsonl
      qconvert eval Qwen3-rtn Qwen3-gptq --against Qwen3 --data wiki.txt
      qconvert eval V3-nvfp4 --against DeepSeek-V3 --data wiki.txt --first-layers 8 --samples 4
      qconvert eval V3-bf16 --against DeepSeek-V3 --synthetic --first-layers 4 --samples 1 --length 32
    """
    if write and first_layers is not None:
        raise click.UsageError(
            "--write notes perplexity and KL, which --first-layers leaves out: omit one"
        )
    if [synthetic, data is not None, task is not None].count(True) != 1:
        raise click.UsageError(
            "give --data FILE or --task FILE, or --synthetic (random tokens) with --first-layers"
        )
    if task is not None and (first_layers is not None or given["column"] is not None):
        raise click.UsageError(
            "--task asks whole models the questions of a file: omit --first-layers and --column"
        )
    if synthetic and first_layers is None:
        raise click.UsageError(
            "random tokens have no perplexity: give --data FILE, or --first-layers N"
        )
    _check_forms(files)
    from qconvert import api

    with from_options():
        name = data if task is None else str(task)
        spec = DataSpec(name, samples or 64, length or 2048, seed or 0, synthetic, given["column"])
    with Bar(" samples") as bar:
        found = api.evaluate(
            models[0], against, name, beside=models[1:], samples=samples, length=spec.length,
            seed=spec.seed, task=task is not None, layers=first_layers, write=write, events=bar,
            notice=lambda text: say(f"qconvert: {text}", err=True), **given,
        )  # fmt: skip
    if as_json:
        say_json(found.as_object())
    else:
        say_report(_rendered(found, ".txt"), "text")
    for file in files:
        with writing(file):
            file.write_text(_rendered(found, file.suffix.lower()) + "\n", encoding="utf-8")


def _check_forms(files: Sequence[Path]) -> None:
    """Raise click.UsageError for a form that there is not, QConvertError for a missing folder: before
    hours of work."""
    from qconvert.core.errors import QConvertError

    for file in files:
        if file.suffix.lower() not in _FORMS:
            raise click.BadParameter(
                f"{file}: expected a name that ends in {', '.join(_FORMS)}", param_hint="'--report'"
            )
    for file in files:
        if not file.absolute().parent.is_dir():
            raise QConvertError(f"{file}: folder {file.parent} does not exist")


def _rendered(found: Evaluation, form: str) -> str:
    if form == ".json":
        return json.dumps(found.as_object(), indent=2)
    return as_html(found) if form == ".html" else as_text(found)


# An evaluation as lines of at most 60 columns.

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
    yield f"{'second less first':<{_LABEL}}{'mean':>10}{'+-':>10}{'errors':>11}"
    for label, *values in differences(apart):
        yield f"{label:<{_LABEL}}{values[0]:>10}{values[1]:>10}{values[2]:>11}"
    if apart.changed is not None:
        yield f"{'questions answered otherwise':<{_LABEL}}{apart.changed:>10,}"


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


def _named(label: str, value: str) -> Iterator[str]:
    lines = textwrap.wrap(shortened(printable(value), 200), WIDTH - 8) or [""]
    for number, line in enumerate(lines):
        yield f"{'' if number else label:<8}{line}"


_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 220, 64, 28


def as_html(found: Evaluation) -> str:
    """Figures of the logits, a plot of the errors by layer and their table, notes. Of several folders
    also what they are apart."""
    every = (found, *found.beside)
    body = [*_top(found), *_differences(found), _figures(every)]
    body += [_by_layer(one, len(every) > 1) for one in every]
    if found.notes:
        items = "".join(f"<li>{markup.text(note)}</li>" for note in found.notes)
        body.append(markup.section("Notes", f"<ul>{items}</ul>"))
    return markup.document(f"Evaluation: {Path(found.folder).name}", body)


def _top(found: Evaluation) -> Iterator[str]:
    about = {
        "folder": ", ".join(one.folder for one in (found, *found.beside)),
        "against": found.against,
        "model": found.model,
        "data": f"{found.data}: {count(found.samples, 'sample')} of at most "
        f"{count(found.length, 'token')}, {count(found.tokens, 'token')} in all, seed {found.seed}",
        "digest of data and tokenizer": found.digest,
    }
    yield '<header class="told">\n<h1>Evaluation</h1>\n<dl>'
    yield from (f"<dt>{markup.text(k)}</dt><dd>{markup.text(v)}</dd>" for k, v in about.items())
    yield "</dl>\n</header>"


def _differences(found: Evaluation) -> Iterator[str]:
    for other in found.beside:
        if (apart := other.differences) is None:
            continue
        yield markup.section(
            f"{markup.text(other.folder)} less {markup.text(found.folder)}",
            f"<p>{markup.text(verdict(found.folder, other.folder, apart))}</p>",
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


# What a server computes.


@click.command(cls=Command)
@click.argument("model", metavar="REPO", type=SOURCE_NAME)
@click.option(
    "--server", type=Parsed("server", parse_server), metavar="URL", required=True,
    help="The server that serves REPO, vLLM's or sglang's: http://HOST:PORT. Its key, if it wants "
    "one, is read from QCONVERT_SERVER_KEY.",
)  # fmt: skip
@option_of(DataSpec, "data")
@option_of(DataSpec, "samples", given=True, default="8")
@option_of(DataSpec, "length", given=True, default="256")
@options_of(DataSpec, "seed", "column", given=True)
@option_of(ValidateOptions, "pair")
@option_of(ValidateOptions, "memory", default="three quarters of the machine's")
@option_of(Calibration, "devices")
@JSON
@OPENING
@VERBOSITY
def ask(
    model: str,
    server: str,
    data: str | None,
    samples: int | None,
    length: int | None,
    seed: int | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Ask a server whether it computes REPO.

    Next-token log-probabilities of a few texts (or of --data), and of 16 tokens that the server adds to
    each, beside those of REPO's own weights on the same ids, as eval computes them.

    Says whether REPO is served right, with more error than its weights explain, or as garbage, and
    what may be the reason. Rounding in another order is measured in the same run, and allowed for; so
    are activations that the format quantizes. Ids are sent: no tokenizer of the server matters. Exit
    code 3 if it is not served right.

    \b
    Examples:
      qconvert ask GLM-4.5-w4a16 --server http://localhost:30000
      qconvert ask Qwen3-w4a16 --server http://gpu7:8000 --data chats.jsonl --samples 4 --json
      qconvert ask V3-cpu --pair V3-gpu --server http://localhost:30000 --memory 48GiB
    """
    from qconvert import api

    if data is None and any(one is not None for one in (samples, length, seed, given["column"])):
        raise click.UsageError("--samples, --length, --seed and --column choose of --data: give it")
    if data is not None:
        with from_options():
            spec = DataSpec(data, samples or 8, length or 256, seed or 0, False, given["column"])
        given |= {"samples": spec.samples, "length": spec.length, "seed": spec.seed}
    with Bar(" samples") as bar:
        found = api.ask(
            model, server, data, events=bar, notice=lambda text: say(f"qconvert: {text}", err=True),
            **given,
        )  # fmt: skip
    if as_json:
        say_json(found.as_object())
    else:
        say_report("\n".join(_answered(found)), "text")
    return 0 if found.verdict == "right" else FINDINGS


def _answered(found: Asked) -> Iterator[str]:
    """The verdict first, then figures of prefill and decoding, and what may be the reason."""
    from qconvert.evaluate.ask import summary

    yield from textwrap.wrap(summary(found), WIDTH)
    yield ""
    yield from _named("folder", found.folder)
    yield from _named("server", f"{found.server}, {found.runtime} {found.version or ''}".rstrip())
    yield from _named("serves", found.name)
    yield ""
    both = found.prefill, found.decode
    for label, *values in (
        ("", "texts", "new tokens"),
        ("tokens", *(f"{one.tokens:,}" for one in both)),
        ("KL(REPO || server), mean", *(f"{one.kl:.3g}" for one in both)),
        ("  nine of ten are below", *(f"{one.high:.3g}" for one in both)),
        ("  that of rounding alone", *(f"{one.noise:.3g}" for one in both)),
        ("  right up to", *(f"{one.limit:.3g}" for one in both)),
        ("same first choice", *(f"{one.agreement:.1%}" for one in both)),
    ):
        yield f"{label:<28}{''.join(f'{value:>13}' for value in values)}".rstrip()
    for cause in found.causes:
        yield ""
        yield from textwrap.wrap(f"may be: {printable(cause)}", WIDTH, break_long_words=False)
    for note in found.notes:
        yield ""
        yield from textwrap.wrap(f"note: {printable(note)}", WIDTH)
