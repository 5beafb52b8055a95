"""inspect, diff, validate: looking without touching."""

from __future__ import annotations

import os
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from qconvert.cli.options import FOLLOW_LINKS, MOST, SOURCE, Size, SourceName
from qconvert.cli.progress import Bar
from qconvert.core.say import say, say_all, say_json, say_report
from qconvert.core.shown import shortened

if TYPE_CHECKING:
    from qconvert.checkpoint.checkpoint import Checkpoint
    from qconvert.hub.headers import Place

_FINDINGS = 3
_MOST_LAYERS = 65_536
_NUMBER = re.compile(r"[0-9]{1,6}")


@click.command()
@SOURCE
@click.option("--tensors", metavar="PATTERN", help="List tensors whose names fit, e.g. '*.61.*'.")
@FOLLOW_LINKS
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def inspect(source: str, tensors: str | None, follow_links: bool, as_json: bool) -> None:
    """Show what a checkpoint holds, from its headers: model, dtypes, roles, quantization.

    Works on sources and on outputs of qconvert. Of a repo on the Hub only headers and small files
    are fetched; with HF_HUB_OFFLINE it is looked for in the local cache.

    \b
    Examples:
      qconvert inspect DeepSeek-V3
      qconvert inspect hf://deepseek-ai/DeepSeek-V3@main
      qconvert inspect Qwen/Qwen3-30B-A3B-FP8 --json
      qconvert inspect DeepSeek-V3 --tensors 'model.layers.61.*'
    """
    from qconvert.checkpoint.open import open_source, stage_folders
    from qconvert.hub.headers import place_of

    with place_of(source) as place:
        _tell_fetched(place)
        checkpoint = open_source(place.folder, follow_links=follow_links)
        if tensors is not None:
            _say_tensors(checkpoint, tensors, as_json=as_json)
            return
        from qconvert.cli.plan_report import inspect_json, inspect_lines, inspect_stages

        stages = stage_folders(Path(place.folder))
        found = inspect_stages(checkpoint, stages) if stages else inspect_json(checkpoint)
        found = {**found, "path": place.named(found["path"])}
        if as_json:
            say_json(found)
        else:
            say(*(place.named(line) for line in inspect_lines(checkpoint.model_line, found)))


def _tell_fetched(place: Place) -> None:
    from qconvert.core.shown import count
    from qconvert.core.sizes import format_size

    if place.fetched:
        size = format_size(place.nbytes)
        say(f"{place.name}: {size} fetched in {count(place.requests, 'request')}", err=True)


def _say_tensors(checkpoint: Checkpoint, pattern: str, *, as_json: bool) -> None:
    from fnmatch import fnmatchcase

    from qconvert.core.names import natural_key

    names = sorted((n for n in checkpoint if fnmatchcase(n, pattern)), key=natural_key)
    if as_json:
        listed = {n: [checkpoint[n].type.dtype, list(checkpoint[n].type.shape)] for n in names}
        say_json(listed)
        return
    files = {name: checkpoint.shards[checkpoint[name].shard].path.name for name in names}
    say_all(f"{name}  {checkpoint[name].type}  {files[name]}" for name in names)


@click.command()
@click.argument("a", type=SourceName())
@click.argument("b", type=SourceName())
@click.option("--headers", is_flag=True, help="Compare names, dtypes and shapes only, not bytes.")
@click.option("--all", "every", is_flag=True, help="A line for every difference.")
@FOLLOW_LINKS
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout: every difference.")
def diff(a: str, b: str, headers: bool, every: bool, follow_links: bool, as_json: bool) -> int:
    """Compare two checkpoints tensor by tensor, wherever their shards put them.

    Differences are told by role, at most a screen of them. Exit code 0 where A and B are equal, 3
    where they differ.

    \b
    Examples:
      qconvert diff DeepSeek-V3-bf16 other-bf16
      qconvert diff original resharded --headers
      qconvert diff one other --all | grep lm_head
    """
    from qconvert.checkpoint.open import open_source
    from qconvert.core.shown import count
    from qconvert.validation.diff import compare, grouped_lines

    first, second = (open_source(where, follow_links=follow_links) for where in (a, b))
    found = compare(first, second, data=not headers)
    if as_json:
        listed = [
            {"tensor": d.tensor, "role": d.role, "kind": d.kind, "detail": d.detail} for d in found
        ]
        say_json(listed)
    else:
        if every:
            say_all(f"{d.kind:<8} {d.tensor}: {d.detail}" for d in found)
        else:
            say_all(grouped_lines(found))
        what = "names, dtypes and shapes" if headers else "tensors"
        say(count(len(found), "difference") if found else f"no difference: {what} are equal")
    return _FINDINGS if found else 0


class Layers(click.ParamType[tuple[int, ...]]):
    """Layer numbers: 0,3,58-60."""

    name = "layers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        numbers: set[int] = set()
        for part in str(value).split(","):
            first, dash, last = part.strip().partition("-")
            if not _NUMBER.fullmatch(first) or (dash and not _NUMBER.fullmatch(last)):
                text = shortened(part, 80)
                self.fail(f"{text!r} is not a layer number or range; write 0,3,58-60", param, ctx)
            begin, end = int(first), int(last or first)
            if end < begin or end > _MOST_LAYERS:
                self.fail(f"{part!r} is not a range of layers from first to last", param, ctx)
            numbers.update(range(begin, end + 1))
        return tuple(sorted(numbers))


@click.command()
@click.argument("out", type=SourceName(), required=False)
@click.option("--against", type=SourceName(), metavar="SRC", help="The source it was made from.")
@click.option(
    "--level",
    type=click.Choice(["headers", "sample", "full"]),
    default="headers",
    show_default=True,
    help="`headers` reads no weights, `sample` some of each kind, `full` every byte.",
)
@click.option(
    "--pair",
    type=SourceName(),
    metavar="GPU",
    help="The GPU side a folder of CPU experts is served with.",
)
@click.option(
    "--kernels",
    is_flag=True,
    help="Compare our Triton kernels with torch: on random weights, and on OUT's where they fit. "
    "Without a GPU they run in Triton's interpreter, small.",
)
@click.option(
    "--logits",
    type=click.IntRange(1, MOST),
    metavar="N",
    help="Run the first N layers of OUT and SRC through transformers on the same tokens.",
)
@click.option(
    "--attribute",
    is_flag=True,
    help="Say how much of the output error each cause makes: codes, activations, FP8.",
)
@click.option(
    "--layers",
    type=Layers(),
    metavar="0,3,58-60",
    help="Layers that --kernels and --attribute look at, instead of a few.",
)
@click.option(
    "--jobs", type=click.IntRange(1, MOST), metavar="N", help="Worker processes [the cores]."
)
@click.option("--memory", type=Size(), metavar="SIZE", help="Memory they may take, e.g. 2GiB.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "junit", "sarif", "markdown", "github", "html"]),
    help="What to print [text; github within GitHub Actions].",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option(
    "--report",
    "files",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write FILE: .html .json .xml (junit) .sarif .md .txt. Repeatable.",
)
@FOLLOW_LINKS
@click.option("--explain", metavar="RULE", help="Print what a rule means, its cause and its fix.")
def validate(
    out: str | None,
    against: str | None,
    level: Literal["headers", "sample", "full"],
    pair: str | None,
    kernels: bool,
    logits: int | None,
    attribute: bool,
    layers: tuple[int, ...] | None,
    jobs: int | None,
    memory: int | None,
    form: str | None,
    as_json: bool,
    files: tuple[Path, ...],
    follow_links: bool,
    explain: str | None,
) -> int:
    """Check a converted folder: index, headers, config, receipt, weights, and that nothing was lost.

    Prints findings, then what was proved, what was only read, and what was not looked at. Exit code 3
    on an error-level finding. Under GitHub Actions it also writes the step's summary. Of a repo on the
    Hub, level headers fetches no weights; other levels take it from the local cache.

    \b
    Examples:
      qconvert validate DeepSeek-V3-bf16
      qconvert validate DeepSeek-V3-bf16 --against DeepSeek-V3 --level full --report page.html
      qconvert validate ORG/NAME@main
      qconvert validate stages --against DeepSeek-V3
      qconvert validate V3-cpu --against DeepSeek-V3 --pair V3-gpu --attribute
      qconvert validate Qwen3.5-fused --against Qwen3.5 --logits 4
      qconvert validate --kernels
      qconvert validate --explain QC015
    """
    from qconvert.checkpoint.open import stage_folders
    from qconvert.core.errors import QConvertError, UsageError
    from qconvert.hub.headers import about_repo, place_of
    from qconvert.validation.reports import append_step_summary, render, suffix_format
    from qconvert.validation.runner import Request, rules, validate_folder, validate_kernels
    from qconvert.validators.headers.stage_set import validate_set

    if explain is not None:
        known = rules()
        if explain.upper() not in known:
            raise UsageError(f"no rule {explain!r}; there are {', '.join(known)}")
        rule = known[explain.upper()]
        say(f"{rule.id}: {rule.title}", f"cause: {rule.cause}", f"fix:   {rule.fix}")
        return 0
    if against is None and (logits or attribute):
        raise click.UsageError(
            "--logits and --attribute compare with the source: give --against SRC"
        )
    if as_json and form not in (None, "json"):
        raise click.UsageError(f"--json is --format json; --format {form} is another")
    if out is None and (against or pair or logits or attribute or layers or level != "headers"):
        raise click.UsageError("name the folder to check")
    forms = [suffix_format(file) for file in files]  # before hours of work
    for file in files:
        if not file.absolute().parent.is_dir():
            raise QConvertError(f"{file}: there is no folder {file.parent} to write it to")
    request = Request(level, layers, kernels, logits or 0, attribute, jobs, memory)
    weights = level != "headers" or bool(kernels or logits or attribute)
    with ExitStack() as stack:
        bar = stack.enter_context(Bar())
        if out is not None:
            place = stack.enter_context(place_of(out, weights=weights))
            _tell_fetched(place)
            folder = Path(place.folder)
            if stage_folders(folder):
                if pair is not None:
                    raise click.UsageError("--pair goes with a folder of experts, not with stages")
                report = validate_set(
                    folder, against, request=request, progress=bar, follow_links=follow_links
                )
            else:
                report = validate_folder(
                    folder, against, request=request, pair=pair, progress=bar,
                    follow_links=follow_links,
                )  # fmt: skip
            report = about_repo(report, place)
        elif kernels:
            report = validate_kernels()
        else:
            raise click.UsageError("name the folder to check, or --kernels for the kernels alone")
    in_actions = os.environ.get("GITHUB_ACTIONS") == "true"
    form = "json" if as_json else form or ("github" if in_actions else "text")
    styled = form == "text" and sys.stdout.isatty()
    say_report(render(report, form, terminal=styled), form, styled=styled)
    for file, kind in zip(files, forms, strict=True):
        file.write_text(render(report, kind), encoding="utf-8")
    try:
        append_step_summary(report)
    except OSError as error:  # says nothing of the folder
        say(f"qconvert: the job's summary was not written: {error}", err=True)
    return _FINDINGS if report.errors else 0
