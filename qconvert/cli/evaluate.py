"""eval: what a conversion cost in quality."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli.command import VERBOSITY, Command
from qconvert.cli.options import (
    JSON,
    OPENING,
    SOURCE_NAME,
    Count,
    from_options,
    option_of,
    options_of,
    report,
)
from qconvert.cli.progress import Bar
from qconvert.core.links import writing
from qconvert.core.say import say, say_json, say_report
from qconvert.samples.request import Calibration, DataSpec
from qconvert.validation.options import ValidateOptions

if TYPE_CHECKING:
    from qconvert.api import Evaluation

_FORMS = (".html", ".json", ".txt")


@click.command(name="eval", cls=Command)
@click.argument("model", metavar="REPO", type=SOURCE_NAME)
@click.option(
    "--against", type=SOURCE_NAME, metavar="SRC", required=True,
    help="The source that the folder was made from, to compare it with.",
)  # fmt: skip
@option_of(DataSpec, "data")
@option_of(DataSpec, "synthetic", help="Random tokens instead of data. [with --first-layers]")
@option_of(DataSpec, "samples", given=True, default="64")
@options_of(DataSpec, "length", "seed", "column", given=True)
@option_of(ValidateOptions, "pair", default="SRC")
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
    help="Note the result in REPO's manifest and on its model card (`model-index`).",
)
@OPENING
@VERBOSITY
def evaluate(
    model: str,
    against: str,
    data: str | None,
    synthetic: bool,
    samples: int | None,
    length: int | None,
    seed: int | None,
    first_layers: int | None,
    as_json: bool,
    files: tuple[Path, ...],
    write: bool,
    **given: Any,
) -> None:
    """Measure what a conversion cost: perplexity of REPO and of SRC, KL divergence, hidden states.

    Both models run on the same tokens, a decoder layer of each in memory at a time, as transformers
    computes them in BF16; weights in any format are decoded. Prints the perplexities, the mean
    KL(SRC || REPO) a token with its standard error over samples, how often both prefer the same token,
    and the relative error of the hidden states after each layer.

    \b
    Examples:
      qconvert eval GLM-4.5-w4a16 --against GLM-4.5 --data wiki.txt
      qconvert eval V3-cpu --against DeepSeek-V3 --pair V3-gpu --data wiki.txt --device cuda:0
      qconvert eval V3-nvfp4 --against DeepSeek-V3 --data chats.jsonl --samples 16 --memory 48GiB
      qconvert eval Qwen3-w4a16 --against Qwen3 --data wiki.txt --report page.html --write
      qconvert eval V3-nvfp4 --against DeepSeek-V3 --data wiki.txt --first-layers 8 --samples 4
      qconvert eval V3-bf16 --against DeepSeek-V3 --synthetic --first-layers 4 --samples 1 --length 32
    """
    if write and first_layers is not None:
        raise click.UsageError(
            "--write notes perplexity and KL, which --first-layers leaves out: omit one"
        )
    if synthetic == (data is not None):
        raise click.UsageError(
            "give --data FILE, or --synthetic (random tokens) with --first-layers"
        )
    if synthetic and first_layers is None:
        raise click.UsageError(
            "random tokens have no perplexity: give --data FILE, or --first-layers N"
        )
    _check_forms(files)
    from qconvert import api

    with from_options():
        spec = DataSpec(data, samples or 64, length or 2048, seed or 0, synthetic, given["column"])
    with Bar(" samples") as bar:
        found = api.evaluate(
            model, against, data, samples=spec.samples, length=spec.length, seed=spec.seed,
            layers=first_layers, write=write, events=bar,
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
    from qconvert.evaluate import report

    if form == ".json":
        return json.dumps(found.as_object(), indent=2)
    return report.as_html(found) if form == ".html" else report.as_text(found)
