"""inspect, diff, validate, advise, repair: what is asked of folders, and their metadata made true."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli import completion
from qconvert.cli.command import VERBOSITY, Command, is_verbose
from qconvert.cli.options import (
    CAPABILITY,
    DRY_RUN,
    FINDINGS,
    GPU_MEMORY,
    JSON,
    NOT_KNOWN,
    OPENING,
    SIZE,
    SOURCE,
    SOURCE_NAME,
    TP,
    Count,
    FolderPath,
    made_for,
    option_of,
    options_of,
    report,
)
from qconvert.cli.profile import PROFILE, profile_json
from qconvert.cli.progress import Bar
from qconvert.core.links import writing
from qconvert.core.say import say, say_all, say_json, say_report
from qconvert.core.shown import count
from qconvert.samples.request import DataSpec
from qconvert.validation.options import ValidateOptions

if TYPE_CHECKING:
    from qconvert.api import Repair
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
    """Show what a checkpoint holds.

    Model, dtypes, roles and quantization, from its headers.

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
@click.option("--headers", is_flag=True, help="Compare names, dtypes and shapes of tensors only.")
@click.option("--all", "every", is_flag=True, help="Print a line for every difference.")
@OPENING
@JSON
def diff(a: str, b: str, headers: bool, every: bool, follow_links: bool, as_json: bool) -> int:
    """Compare two checkpoints and their configs.

    Tensor by tensor, key by key of config.json; as well generation_config.json, hf_quant_config.json,
    files of tokenizers and processors, and the model's code. README, qconvert's own files and who
    wrote a config (transformers_version) are not compared; of lists of modules that are not quantized
    and of other files it is said whether they differ.
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
    from qconvert.validation.diff import (
        compared_text,
        grouped_lines,
        lists_text,
        uncompared_text,
    )

    if not headers and any(name.startswith("hf://") for name in (a, b)) and not _offline():
        return _diff_files(a, b, follow_links=follow_links, as_json=as_json)
    both = [api.open_checkpoint(name, follow_links=follow_links) for name in (a, b)]
    found = api.diff(*both, data=not headers)
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
        equal = len({*both[0], *both[1]}) - sum(not d.of_file for d in found)
        lists = "" if headers else lists_text(*both)
        what = f"{count(equal, 'tensor')} {'is' if equal == 1 else 'are'} equal"
        if found:
            say(f"{count(len(found), 'difference')}; {what}")
        elif headers:
            say(f"no difference: {what} in name, dtype and shape")
        else:
            but = "no difference" if not lists else "no difference but in lists"
            say(f"{but}: {what}, and so are {compared_text(*both)}")
        if lists:
            say(
                f"lists     of modules that are not quantized differ, and are not compared: "
                f"{lists}; qconvert validate judges each"
            )
        if others := "" if headers else uncompared_text(*both):
            say(f"files     that differ, or are in one alone, and are not counted: {others}")
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
@options_of(
    ValidateOptions, "against", "draft", "adapter", "beside", "level", "pair", "kernels", "layers"
)
@made_for("sglang or vllm, whose loaders are simulated, by default for an H200", "sglang", "vllm")
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
    """Check a folder, alone or against its source.

    Index, headers, config, receipt, weights, and that nothing was lost.

    Prints the verdict, findings, what was proved, what was only read, and how much was not checked,
    which -v lists. Exit code 3 on an error-level finding, else 5 if what --for asks is not known for
    the class or version. In GitHub Actions it also writes the step's summary. From a repo on the Hub
    level headers fetches no weights, the others what they read, where the local cache lacks it.

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
        text = render(report, form, terminal=styled, brief=not is_verbose())
        say_report(text, form, styled=styled)
    for file, kind in files.items():
        with writing(file):
            file.write_text(render(report, kind), encoding="utf-8")
    try:
        append_step_summary(report)
    except OSError as error:  # no fault of the folder
        say(f"qconvert: the job's summary was not written: {error}", err=True)


@click.command(cls=Command)
@SOURCE
@made_for(
    "sglang or vllm, whose loaders are simulated, or ktransformers",
    "sglang",
    "vllm",
    "ktransformers",
)
@click.option("--gpus", type=Count(), default=8, show_default=True, help="GPUs.")
@click.option(
    "--gpu-memory", type=GPU_MEMORY, default="141GB", show_default=True, help="Memory of each GPU."
)
@click.option("--capability", **CAPABILITY)
@click.option("--cpu-memory", type=SIZE, help="Main memory. KTransformers keeps experts in it.")
@click.option(
    "--numa", type=Count(most=64), default=2, show_default=True,
    help="NUMA nodes of the serving machine; the runtime must be started with the same count.",
)  # fmt: skip
@click.option(
    "--hotness", metavar="FILE",
    help="A hotness.pt of a calibration: KTransformers keeps the experts used most on the GPU.",
)  # fmt: skip
@click.option(
    "--disk", type=SIZE, default="1GB", show_default=True, help="Bytes a second of the disk."
)
@click.option(
    "--disaggregated", is_flag=True, help="Print a launch line for each role: prefill and decode."
)
@option_of(DataSpec, "data")
@option_of(ValidateOptions, "loader")
@OPENING
@JSON
def advise(
    source: str,
    consumer: str | None,
    gpus: int,
    gpu_memory: int,
    capability: tuple[int, int],
    cpu_memory: int | None,
    disk: int,
    as_json: bool,
    **given: Any,
) -> int:
    """Say which conversion a model needs, if any.

    The first conversion that a runtime loads and the machine holds, and the line that serves it.

    Plans several conversions from headers, asks a simulator of the runtime's loader whether each would
    load at each tensor-parallel size, and compares the bytes of the fullest rank with the GPU's
    memory. "nothing: serve it as it is" is an answer. Of a repo on the Hub only headers are fetched.

    \b
    Examples:
      qconvert advise Qwen/Qwen3-30B-A3B-FP8 --for sglang --gpus 4
      qconvert advise DeepSeek-V3 --for sglang==0.5.23 --gpus 8 --gpu-memory 80GB
      qconvert advise DeepSeek-V3 --for vllm --gpus 8
      qconvert advise DeepSeek-V3 --for ktransformers --gpus 1 --gpu-memory 48GB --cpu-memory 768GB

    Exit code 3 if nothing that was considered loads and fits, 5 if that is not known for the class or
    version.
    """
    from dataclasses import replace
    from pathlib import Path

    from qconvert import api
    from qconvert.advise.advice import as_json as told
    from qconvert.advise.advice import lines_of
    from qconvert.cli.convert import uncollected
    from qconvert.hub.headers import place_of

    if consumer is None:
        raise click.UsageError("name the runtime: --for sglang, --for vllm or --for ktransformers")
    machine = api.Machine(gpus, gpu_memory, cpu_memory, disk, capability)
    with place_of(source) as place:
        if place.fetched:
            say(place.summary, err=True)
        with uncollected():
            advice = api.advise(Path(place.folder), consumer, machine, **given)
        found = replace(advice, source=source)  # in lines to paste a repo is a repo
        if as_json:
            say_json(told(found))
        else:
            say_all(place.named(line) for line in lines_of(found))
    return 0 if found.best is not None else NOT_KNOWN if found.not_known else FINDINGS


_MOST_LINES = 40  # of a diff: an ignore list may have a line a layer


@click.command(cls=Command)
@click.argument("source", metavar="REPO", type=SOURCE_NAME)
@click.option(
    "--out",
    type=FolderPath(),
    metavar="DIR",
    help="Write the changed files here, and leave REPO as it is. Needed for a repo on the Hub.",
)
@made_for("sglang, whose loader is simulated: an H200 without other options", "sglang")
@TP
@option_of(ValidateOptions, "loader")
@DRY_RUN
@OPENING
@JSON
def repair(
    source: str,
    out: Path | None,
    consumer: str | None,
    tp: int | None,
    loader: str | None,
    dry_run: bool,
    follow_links: bool,
    as_json: bool,
) -> int:
    """Make a folder's metadata true to its weights.

    The weights are not touched.

    Mends config.json (quantization blocks that describe no tensor, ignore lists, what is block FP8), the
    index, hf_quant_config.json and the model card, and seals manifest and receipt again with the hashes
    before and after. The result is validated before anything is written; what only a new conversion can
    mend is refused. Of a repo on the Hub headers are fetched, and the changed files are written to a
    folder that can be uploaded.

    \b
    Examples:
      qconvert repair GLM-4.5-Air-int4 --dry-run
      qconvert repair GLM-4.5-Air-int4 --for sglang==0.5.23 --tp 4
      qconvert repair ORG/GLM-4.5-Air-int4 --out mended

    Exit code 3 with --dry-run if errors would remain.
    """
    from qconvert import api

    if consumer is None and tp is not None:
        raise click.UsageError("--tp is a size of a runtime: give --for NAME")
    found = api.repair(
        source, out, runtime=consumer, tp=tp or 1, loader=loader, dry_run=dry_run,
        follow_links=follow_links, notice=lambda text: say(text, err=True),
    )  # fmt: skip
    if as_json:
        say_json([_as_json(one) for one in found])
    else:
        for one in found:
            _show(one, out, dry_run=dry_run)
    return FINDINGS if any(one.left for one in found) else 0


def _as_json(one: Repair) -> dict[str, Any]:
    return {
        "folder": str(one.folder),
        "changes": [
            {"file": change.file, "why": list(change.why), "diff": change.diff()}
            for change in one.changes
        ],
        "fixed": [f"{f.rule}: {f.where}: {f.message}" for f in one.fixed],
        "left": [f"{f.rule}: {f.where}: {f.message}" for f in one.left],
    }


def _show(one: Repair, out: Path | None, *, dry_run: bool) -> None:
    if not one.changes and not one.left:
        say(f"{one.folder}: nothing to repair in its metadata; no weights were read")
        return
    for change in one.changes:
        say(f"{change.file}:", *(f"  {reason}" for reason in change.why))
        lines = change.diff()
        say(*(f"    {line}" for line in lines[:_MOST_LINES]))
        if len(lines) > _MOST_LINES:
            say(f"    ... {count(len(lines) - _MOST_LINES, 'more line')} (--json shows all)")
    for finding in one.fixed:
        say(f"ends {finding.rule}: {finding.where}: {finding.message}")
    for finding in one.left:
        say(f"left {finding.rule}: {finding.where}: {finding.message}")
    files = count(len(one.changes), "file")
    say(f"would change {files}" if dry_run else f"changed {files} in {out or one.folder}")
