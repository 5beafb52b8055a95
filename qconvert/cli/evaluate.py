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
from qconvert.cli.evaluation_report import WIDTH, as_html, as_text, named
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
from qconvert.core.shown import printable
from qconvert.evaluate.result import Evaluation
from qconvert.samples.request import Calibration, DataSpec
from qconvert.validation.options import ValidateOptions

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
    yield from named("folder", found.folder)
    yield from named("server", f"{found.server}, {found.runtime} {found.version or ''}".rstrip())
    yield from named("serves", found.name)
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
