"""eval: what a conversion cost in quality."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qconvert.cli.command import Command
from qconvert.cli.options import (
    DATA_HELP,
    DEVICE,
    JSON,
    OPENING,
    Count,
    DataName,
    SourceName,
    from_options,
    memory,
    pair,
    report,
)
from qconvert.cli.progress import Bar
from qconvert.cli.verbosity import VERBOSITY
from qconvert.core.regular import writing
from qconvert.core.say import say, say_json, say_report

if TYPE_CHECKING:
    from qconvert.api import Evaluation

_FORMS = (".html", ".json", ".txt")


@click.command(name="eval", cls=Command)
@click.argument("model", metavar="REPO", type=SourceName())
@click.option(
    "--against",
    type=SourceName(),
    metavar="SRC",
    required=True,
    help="The source that the folder was made from, to compare it with.",
)
@click.option("--data", metavar="FILE", type=DataName(), help=DATA_HELP)
@click.option(
    "--synthetic", is_flag=True, help="Random tokens instead of data. [with --first-layers]"
)
@click.option("--samples", type=Count(), help="Number of samples. [default: 64]")
@click.option("--length", type=Count(2), help="Tokens per sample. [default: 2048]")
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), help="Seed for the choice of samples. [default: 0]"
)
@click.option("--column", help="JSONL key or dataset column with the text.")
@pair("SRC")
@click.option(
    "--first-layers",
    "first_layers",
    type=Count(),
    metavar="N",
    help="Run the first N layers alone: errors of hidden states, and no perplexity.",
)
@memory("three quarters of the machine's")
@DEVICE
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
    column: str | None,
    pair: str | None,
    first_layers: int | None,
    memory: int | None,
    devices: tuple[str, ...],
    as_json: bool,
    files: tuple[Path, ...],
    write: bool,
    follow_links: bool,
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
    from qconvert.samples.data import DataSpec

    with from_options():
        DataSpec(data, samples or 64, length or 2048, seed or 0, synthetic, column)
    with Bar(" samples") as bar:
        found = api.evaluate(
            model, against, data, samples=samples or 64, length=length or 2048, seed=seed or 0,
            column=column, pair=pair, layers=first_layers, memory=memory, devices=devices,
            write=write, follow_links=follow_links, events=bar,
            notice=lambda text: say(f"qconvert: {text}", err=True),
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
    from qconvert.evaluate import as_html, as_text

    if form == ".json":
        return json.dumps(found.as_object(), indent=2)
    return as_html.render(found) if form == ".html" else as_text.render(found)
