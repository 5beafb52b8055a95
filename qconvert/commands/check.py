"""inspect, diff, validate: looking without touching."""

from __future__ import annotations

import json
from pathlib import Path

import click

from qconvert.commands.options import SOURCE, Folder

_FINDINGS = 3


@click.command()
@SOURCE
@click.option("--tensors", metavar="PATTERN", help="List tensors whose names fit, e.g. '*.61.*'.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def inspect(source: str, tensors: str | None, as_json: bool) -> None:
    """Show what a checkpoint holds, from its headers: model, dtypes, roles, quantization.

    Works on sources and on outputs of qconvert.

    \b
    Examples:
      qconvert inspect DeepSeek-V3
      qconvert inspect Qwen/Qwen3-30B-A3B-FP8 --json
      qconvert inspect DeepSeek-V3 --tensors 'model.layers.61.*'
    """
    from fnmatch import fnmatchcase

    from qconvert.names import natural_key
    from qconvert.report import inspect_json, inspect_text
    from qconvert.stages import open_source

    checkpoint = open_source(source)
    if tensors is not None:
        names = sorted((n for n in checkpoint if fnmatchcase(n, tensors)), key=natural_key)
        if as_json:
            listed = {n: [checkpoint[n].type.dtype, list(checkpoint[n].type.shape)] for n in names}
            click.echo(json.dumps(listed, indent=2))
        else:
            for name in names:
                file = checkpoint.shards[checkpoint[name].shard].path.name
                click.echo(f"{name}  {checkpoint[name].type}  {file}")
    elif as_json:
        click.echo(json.dumps(inspect_json(checkpoint), indent=2))
    else:
        click.echo(inspect_text(checkpoint))


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--headers", is_flag=True, help="Compare names, dtypes and shapes only, not bytes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def diff(a: str, b: str, headers: bool, as_json: bool) -> int:
    """Compare two checkpoints tensor by tensor, wherever their shards put them.

    Exit code 0 where they are equal, 3 where they differ.

    \b
    Examples:
      qconvert diff DeepSeek-V3-bf16 other-bf16
      qconvert diff original resharded --headers
    """
    from qconvert.diff import compare
    from qconvert.stages import open_source

    found = compare(open_source(a), open_source(b), data=not headers)
    if as_json:
        listed = [{"tensor": d.tensor, "kind": d.kind, "detail": d.detail} for d in found]
        click.echo(json.dumps(listed, indent=2))
    else:
        for difference in found:
            click.echo(f"{difference.kind:<8} {difference.tensor}: {difference.detail}")
        what = "names, dtypes and shapes" if headers else "tensors"
        click.echo(f"{len(found)} differences" if found else f"no difference: {what} are equal")
    return _FINDINGS if found else 0


@click.command()
@click.argument("out", type=Folder())
@click.option("--against", metavar="SRC", help="The source it was made from.")
@click.option(
    "--level",
    type=click.Choice(["headers", "full"]),
    default="headers",
    show_default=True,
    help="`full` reads every byte and compares the receipt's hashes.",
)
@click.option("--pair", metavar="GPU", help="The GPU side a folder of CPU experts is served with.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def validate(out: Path, against: str | None, level: str, pair: str | None, as_json: bool) -> int:
    """Check a converted folder: index, headers, config, receipt, and that no source byte was lost.

    Prints findings, then what was proved and what was not looked at. Exit code 3 on findings.

    \b
    Examples:
      qconvert validate DeepSeek-V3-bf16
      qconvert validate DeepSeek-V3-bf16 --against DeepSeek-V3 --level full
      qconvert validate V3-cpu --against DeepSeek-V3 --pair V3-gpu
    """
    from qconvert.validation import validate_folder

    report = validate_folder(out, against, full=level == "full", pair=pair)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        for finding in report.findings:
            click.echo(f"{finding.severity:<7} {finding.rule} {finding.where}: {finding.message}")
        for label, texts in (("proved", report.proved), ("not checked", report.not_checked)):
            for text in texts:
                click.echo(f"{label}: {text}")
        errors = sum(finding.severity == "error" for finding in report.findings)
        click.echo(f"{errors} errors, {len(report.findings) - errors} warnings")
    return _FINDINGS if any(f.severity == "error" for f in report.findings) else 0
