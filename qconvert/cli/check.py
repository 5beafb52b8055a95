"""inspect, diff, validate: commands that only read."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli import completion
from qconvert.cli.command import VERBOSITY, Command
from qconvert.cli.options import (
    FINDINGS,
    JSON,
    OPENING,
    SOURCE,
    SOURCE_NAME,
    made_for,
    options_of,
    report,
)
from qconvert.cli.profile import PROFILE, profile_json
from qconvert.cli.progress import Bar
from qconvert.core.links import writing
from qconvert.core.say import say, say_all, say_json, say_report
from qconvert.validation.options import ValidateOptions

if TYPE_CHECKING:
    from qconvert.checkpoint.checkpoint import Checkpoint
    from qconvert.validation.runner import Report


@click.command(cls=Command)
@SOURCE
@click.option(
    "--tensors", metavar="PATTERN", help="List tensors whose names match, such as '*.61.*'."
)
@OPENING
@JSON
def inspect(source: str, tensors: str | None, follow_links: bool, as_json: bool) -> None:
    """Show the contents of a checkpoint, from its headers: model, dtypes, roles, quantization.

    Works on sources and on outputs of qconvert. From a repo on the Hub only headers and small files are
    fetched; with HF_HUB_OFFLINE the local cache is used.

    \b
    Examples:
      qconvert inspect DeepSeek-V3
      qconvert inspect hf://deepseek-ai/DeepSeek-V3@main
      qconvert inspect Qwen/Qwen3-30B-A3B-FP8 --json
      qconvert inspect DeepSeek-V3 --tensors 'model.layers.61.*'
    """
    from qconvert.api import open_checkpoint
    from qconvert.checkpoint.open import stage_folders
    from qconvert.hub.headers import place_of

    with place_of(source) as place:
        if place.fetched:
            say(place.summary, err=True)
        checkpoint = open_checkpoint(place.folder, follow_links=follow_links)
        if tensors is not None:
            _say_tensors(checkpoint, tensors, as_json=as_json)
            return
        from qconvert.cli.inspect_report import inspect_json, inspect_lines, inspect_stages

        stages = stage_folders(Path(place.folder))
        found = inspect_stages(checkpoint, stages) if stages else inspect_json(checkpoint)
        found = {**found, "path": place.named(found["path"])}
        if as_json:
            say_json(found)
        else:
            say(*(place.named(line) for line in inspect_lines(checkpoint.model_line, found)))


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


@click.command(cls=Command)
@click.argument("a", type=SOURCE_NAME)
@click.argument("b", type=SOURCE_NAME)
@click.option("--headers", is_flag=True, help="Compare names, dtypes and shapes only, not bytes.")
@click.option("--all", "every", is_flag=True, help="Print a line for every difference.")
@OPENING
@JSON
def diff(a: str, b: str, headers: bool, every: bool, follow_links: bool, as_json: bool) -> int:
    """Compare two checkpoints tensor by tensor, whatever their shards.

    Differences are grouped by role, at most a screen of them. Exit code 0 if A and B are equal, 3 if
    they differ. A repo that is named by hf:// is compared file by file, by the sizes and hashes that the
    Hub lists: no weights are fetched.

    \b
    Examples:
      qconvert diff DeepSeek-V3-bf16 other-bf16
      qconvert diff original resharded --headers
      qconvert diff one other --all | grep lm_head
      qconvert diff V3-bf16 hf://me/DeepSeek-V3-bf16
    """
    from qconvert import api
    from qconvert.core.shown import count
    from qconvert.validation.diff import grouped_lines

    if not headers and any(name.startswith("hf://") for name in (a, b)) and not _offline():
        return _diff_files(a, b, follow_links=follow_links, as_json=as_json)
    found = api.diff(a, b, data=not headers, follow_links=follow_links)
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
    return FINDINGS if found else 0


def _offline() -> bool:
    """Return whether the client must not reach the Hub: a repo is then what the cache has."""
    from huggingface_hub import is_offline_mode

    return is_offline_mode()


def _diff_files(a: str, b: str, *, follow_links: bool, as_json: bool) -> int:
    """Compare files by size and hash."""
    from dataclasses import asdict

    from qconvert import api
    from qconvert.core.shown import count

    found = api.diff_files(a, b, follow_links=follow_links)
    if as_json:
        say_json([asdict(each) for each in found.differences])
    else:
        says = {"only-a": "is only in A", "only-b": "is only in B", "data": "differs"}
        say_all(f"{d.file}: {says[d.kind]} ({d.detail})" for d in found.differences)
        equal = f"{count(found.equal, 'file')} equal by size and hash"
        more = count(len(found.differences), "difference")
        say(f"{more}, {equal}" if found.differences else f"no difference: {equal}")
    return FINDINGS if found.differences else 0


@click.command(cls=Command)
@click.argument("out", type=SOURCE_NAME, required=False)
@options_of(ValidateOptions, "against", "draft", "beside", "level", "pair", "kernels", "layers")
@made_for("sglang, whose loader is simulated: an H200 without other options", "sglang", "vllm")
@options_of(ValidateOptions, "tp", "pp", "ep", "loader", "jobs", "memory")
@click.option(
    "--format", "form",
    type=click.Choice(["text", "json", "junit", "sarif", "markdown", "github", "html"]),
    help="Format of the printed report. [default: text; github in GitHub Actions]",
)  # fmt: skip
@JSON
@report(".html .json .xml (junit) .sarif .md .txt")
@PROFILE
@OPENING
@VERBOSITY
@click.option(
    "--explain", metavar="RULE", shell_complete=completion.rules,
    help="Print what a rule means, its cause and its fix.",
)  # fmt: skip
def validate(
    out: str | None,
    consumer: str | None,
    form: str | None,
    as_json: bool,
    files: tuple[Path, ...],
    explain: str | None,
    **given: Any,
) -> int:
    """Check a converted folder: index, headers, config, receipt, weights, and that nothing was lost.

    Prints findings, then what was proved, what was only read, and what was not checked. Exit code 3 on
    an error-level finding, else 5 if what --for asks is not known for the class or version. In GitHub
    Actions it also writes the step's summary. From a repo on the Hub level headers fetches no weights,
    the others what they read, where the local cache lacks it.

    \b
    Examples:
      qconvert validate DeepSeek-V3-bf16
      qconvert validate DeepSeek-V3-bf16 --against DeepSeek-V3 --level full --report page.html
      qconvert validate ORG/NAME@main
      qconvert validate rounded --against SRC --beside calibrated --level full --report both.html
      qconvert validate stages --against DeepSeek-V3
      qconvert validate V3-cpu --against DeepSeek-V3 --pair V3-gpu --level full
      qconvert validate with-draft --against Qwen3.5-w4a16 --draft Qwen3.5-draft --level full
      qconvert validate GLM-4.5-w4a16 --for sglang==0.5.23 --tp 8
      qconvert validate GLM-4.5-w4a16 --for vllm==0.33.0 --tp 8 --pp 2
      qconvert validate GLM-4.5-w4a16 --for vllm --tp 8 --loader /opt/venv/bin/python
      qconvert validate --kernels
      qconvert validate --explain QC015
    """
    from qconvert import api

    if explain is not None:
        _explain(explain)
        return 0
    options = ValidateOptions(runtime=consumer, **given)
    if as_json and form not in (None, "json"):
        raise click.UsageError(f"--json is --format json; --format {form} is another")
    about = replace(options, kernels=False, jobs=None, memory=None, follow_links=False)
    if out is None and about != ValidateOptions():
        raise click.UsageError("name the folder to check")
    if out is None and not options.kernels:
        raise click.UsageError("name the folder to check, or --kernels for the kernels alone")
    forms = _forms(files)  # before hours of work
    with Bar() as bar:
        report = api.validate_kernels() if out is None else api.validate(
            out, options.against, events=bar, notice=lambda text: say(text, err=True),
            **options.keywords(),
        )  # fmt: skip
    _show_report(report, "json" if as_json else form, dict(zip(files, forms, strict=True)))
    return report.exit_code


def _explain(rule_id: str) -> None:
    """Print a rule. Raises UsageError for an unknown id."""
    from qconvert.core.errors import UsageError
    from qconvert.validation.runner import rules

    known = rules()
    if rule_id.upper() not in known:
        raise UsageError(f"unknown rule {rule_id!r}; rules are {', '.join(known)}")
    rule = known[rule_id.upper()]
    say(f"{rule.id}: {rule.title}", f"cause: {rule.cause}", f"fix:   {rule.fix}")


def _forms(files: Sequence[Path]) -> list[str]:
    """Formats of report files. Raises UsageError for an unknown suffix, QConvertError for a missing
    folder."""
    from qconvert.core.errors import QConvertError
    from qconvert.validation.reports import suffix_format

    forms = [suffix_format(file) for file in files]
    for file in files:
        if not file.absolute().parent.is_dir():
            raise QConvertError(f"{file}: folder {file.parent} does not exist")
    return forms


def _show_report(report: Report, form: str | None, files: Mapping[Path, str]) -> None:
    """Print the report, write it to files, and to the step's summary in GitHub Actions."""
    from qconvert.validation.reports import append_step_summary, as_object, render

    in_actions = os.environ.get("GITHUB_ACTIONS") == "true"
    form = form or ("github" if in_actions else "text")
    styled = form == "text" and sys.stdout.isatty()
    profile = profile_json() if form == "json" else {}
    if profile:
        say_json({**as_object(report), **profile})
    else:
        say_report(render(report, form, terminal=styled), form, styled=styled)
    for file, kind in files.items():
        with writing(file):
            file.write_text(render(report, kind), encoding="utf-8")
    try:
        append_step_summary(report)
    except OSError as error:  # no fault of the folder
        say(f"qconvert: the job's summary was not written: {error}", err=True)
