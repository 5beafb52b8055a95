"""report: what others need to know to help, and nothing that is not theirs to know."""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qconvert import __version__
from qconvert.cli.command import Command
from qconvert.cli.options import FINDINGS, JSON, OPENING, SOURCE_NAME
from qconvert.core.extras import EXTRAS
from qconvert.core.say import say, say_json
from qconvert.core.shown import count, format_size

if TYPE_CHECKING:
    from qconvert.checkpoint.checkpoint import Checkpoint

# Distributions whose versions decide what a conversion or a server does, beside those of the extras.
_PACKAGES = (
    "numpy", "safetensors", "huggingface_hub", "click", "pydantic", "compressed_tensors", "kt_kernel",
    "sglang", "vllm",
)  # fmt: skip
# An absolute path or a URL in a text: of this machine, or of somebody's bucket.
_PATH = re.compile(r"(?<![\w.])(?:[a-z][a-z0-9+.-]*://|~?/)[^\s'\",;:()]*[^\s'\",;:().]")


@click.command(cls=Command)
@click.argument("source", metavar="[FOLDER]", type=SOURCE_NAME, required=False)
@click.option(
    "--paths",
    is_flag=True,
    help="Also print the path of FOLDER, its source's repo, and the messages of findings as they are.",
)
@OPENING
@JSON
def report(source: str | None, paths: bool, follow_links: bool, as_json: bool) -> int:
    """Print what a report of a problem needs.

    Versions, platform, and of FOLDER the model, how it was made, and the rules that header validation
    finds broken.

    No weights are read, and no name of a user, path, repo, token or value of an environment variable is
    printed: read it before you post it all the same.

    \b
    Examples:
      qconvert report
      qconvert report GLM-4.5-Air-int4
      qconvert report GLM-4.5-Air-int4 --json

    Exit code 3 if FOLDER cannot be opened or a rule finds an error.
    """
    found = _machine()
    if source is not None:
        found["folder"] = _folder(source, paths=paths, follow_links=follow_links)
    if as_json:
        say_json(found)
    else:
        say(*_lines(found))
    folder = found.get("folder", {})
    errors = any(one["severity"] == "error" for one in folder.get("findings", ()))
    return FINDINGS if errors or "refused" in folder else 0


def _machine() -> dict[str, Any]:
    """Versions and sizes of what qconvert runs on."""
    names = sorted({*_PACKAGES, *(name for extra in EXTRAS.values() for name in extra)})
    packages = {name: version for name in names if (version := _version(name)) is not None}
    return {
        "qconvert": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "packages": packages,
        # Their values may be paths or secrets.
        "settings": sorted(n for n in os.environ if n.startswith(("QCONVERT_", "HF_HUB_"))),
    }


def _version(package: str) -> str | None:
    """An installed distribution's version, without importing it."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _folder(source: str, *, paths: bool, follow_links: bool) -> dict[str, Any]:
    """Return what headers, manifest and header rules say. Raises CheckpointError if there is no such
    folder."""
    from qconvert import api
    from qconvert.core.errors import CheckpointError

    def shown(text: str) -> str:
        return text if paths else without_paths(text, source)

    try:
        checkpoint = api.open_checkpoint(source, follow_links=follow_links)
    except CheckpointError as error:
        if not Path(source).exists():
            raise
        return {"refused": shown(str(error)), "state": _state(source)}
    report = api.validate(source, level="headers", follow_links=follow_links)
    rules = Counter((one.rule, one.severity) for one in report.findings)
    first = {one.rule: one for one in reversed(report.findings)}
    found = {
        **_model(checkpoint),
        "state": _state(source),
        "made": [shown(line) for line in _made(checkpoint, paths=paths)],
        "warnings": [shown(text) for text in checkpoint.warnings],
        "findings": [
            {
                "rule": rule, "severity": severity, "count": number,
                "first": shown(f"{first[rule].where}: {first[rule].message}"),
            }
            for (rule, severity), number in sorted(rules.items())
        ],
    }  # fmt: skip
    return {"path": source, **found} if paths else found


def _model(checkpoint: Checkpoint) -> dict[str, Any]:
    from qconvert.cli.inspect_report import inspect_json

    kept = ("model_type", "family", "layers", "experts", "mtp_layers", "files", "tensors", "bytes",
            "formats", "quantization")  # fmt: skip
    told = inspect_json(checkpoint)
    return {
        "architectures": checkpoint.config.get("architectures"),
        **{name: told[name] for name in kept},
        "unknown": len(told["unknown"]),
        "missing": len(told["missing"]),
    }


def _made(checkpoint: Checkpoint, *, paths: bool) -> Iterator[str]:
    """The lines of `inspect` on the manifest; the source's repo only with `paths`."""
    from qconvert.cli.inspect_report import inspect_json, provenance_lines

    if checkpoint.manifest is not None:
        base = inspect_json(checkpoint)["made_from"] if paths else None
        yield from provenance_lines(checkpoint.manifest, base)


def _state(source: str) -> str:
    """Return what an unfinished run has left there."""
    from qconvert import api
    from qconvert.core.errors import QConvertError

    if not Path(source).is_dir():
        return ""
    try:
        stages = api.status(source)
    except QConvertError:  # nothing of qconvert's
        return ""
    states = Counter(stage.state for stage in stages)
    return ", ".join(
        state if number == 1 else f"{count(number, 'stage')} {state}"
        for state, number in states.items()
    )


def without_paths(text: str, folder: str) -> str:
    """A message without the folder's name, other paths and URLs."""
    for name in sorted(
        {folder, str(Path(folder).absolute()), str(Path(folder).resolve())}, key=len
    ):
        text = text.replace(name, "FOLDER") if len(name) > 1 else text
    return _PATH.sub("PATH", text)


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"qconvert {found['qconvert']}, {found['python']}, {found['platform']}"
    yield f"{count(found['cores'], 'core')}, {format_size(found['memory'])} of memory"
    yield "packages: " + ", ".join(f"{name} {v}" for name, v in found["packages"].items())
    yield f"settings: {', '.join(found['settings']) or 'none'}"
    if "folder" not in found:
        return
    folder = found["folder"]
    yield ""
    if "path" in folder:
        yield folder["path"]
    if folder["state"]:
        yield f"state: {folder['state']}"
    if "refused" in folder:
        yield f"cannot be opened: {folder['refused']}"
        return
    classes = folder["architectures"]
    yield (
        f"{folder['model_type']} {classes if isinstance(classes, list) else ''} "
        f"(family {folder['family']}): {count(folder['layers'], 'layer')}, "
        f"{count(folder['experts'], 'expert')}, {count(folder['mtp_layers'], 'MTP layer')}"
    )
    yield (
        f"{count(folder['files'], 'file')}, {count(folder['tensors'], 'tensor')}, "
        f"{format_size(folder['bytes'])}; {folder['unknown']} unknown, {folder['missing']} missing"
    )
    yield from (f"quantized  {line}" for line in folder["quantization"])
    for name, entry in folder["formats"].items():
        yield f"format  {name}: {count(entry['tensors'], 'tensor')}, {format_size(entry['bytes'])}"
    yield from folder["made"]
    yield from (f"warning: {text}" for text in folder["warnings"])
    for one in folder["findings"]:
        yield f"{one['severity']} {one['rule']}, {count(one['count'], 'time')}, first: {one['first']}"
    if not folder["findings"]:
        yield "header rules: no finding"
