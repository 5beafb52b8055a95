"""The README.md of a folder, written before an upload, and its line in the receipt."""

from __future__ import annotations

import json
import os
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from qconvert import __version__
from qconvert.checkpoint.checkpoint import MANIFEST, RECEIPT, Checkpoint
from qconvert.checkpoint.receipt import parse_receipt, sealed_lines
from qconvert.core.dtypes import TypesOf
from qconvert.core.errors import CheckpointError
from qconvert.core.json_text import parse_json, parse_object
from qconvert.core.links import SMALL, read_inside, writing
from qconvert.core.manifest_keys import checked_manifest
from qconvert.hub.card import README, card, split_front_matter
from qconvert.hub.card.front import base_model_of, base_of
from qconvert.plan.plan import Plan, described
from qconvert.runtimes.serving import Loading, loads

if TYPE_CHECKING:
    from qconvert.validation.runner import Report


# Rules that compare README.md with the receipt: people edit it after a conversion.
_OF_RECEIPT = frozenset({"QC020", "QC021", "QC022"})
# Keys of a manifest that cards need, as plan/plan.py writes them.
_OF_MANIFEST = {
    "identity": dict, "passes": list, "lossy_steps": dict, "dropped": dict, "dropped_files": dict,
    "bytes": dict,
}  # fmt: skip
_OF_STEP = ("name", "options", "matched", "expected")
# One line per tensor, which names everything that was stacked into it.
_MOST_RECEIPT = 16 * SMALL
_SIZES = ("in", "out", "dropped")


def account_for_readme(folder: Path) -> bool:
    """Update the receipt's line of README.md: people edit that file, and validation compares every file
    with the receipt. Returns whether the line changed. A folder without a receipt is left alone."""
    readme = _read(folder, README)
    true = None if readme is None else _true_receipt(folder, readme)
    if true is None:
        return False
    _replace(folder / RECEIPT, true)
    return True


def _true_receipt(folder: Path, readme: bytes) -> bytes | None:
    """The receipt for that README.md; None if it is correct already or does not exist."""
    receipt = _read(folder, RECEIPT, _MOST_RECEIPT)
    if receipt is None:
        return None
    lines = receipt.splitlines()
    # A seal is made anew for what stands behind it only where it was right: a broken receipt is for
    # validation to name, and must not pass for a sound one afterwards.
    try:
        seal = parse_receipt(receipt, folder / RECEIPT).seal
    except CheckpointError:
        return None
    if seal != "none":
        lines.pop()
    at, said = _line_of_readme(lines)
    true = _record(readme, said)
    if true == said or seal == "broken":
        return None
    raw = json.dumps(true, separators=(",", ":")).encode()
    if at is None:
        lines.append(raw)
    else:
        lines[at] = raw
    texts = [line.decode() for line in lines]
    return ("\n".join(sealed_lines(texts) if seal == "sound" else texts) + "\n").encode()


def _line_of_readme(lines: list[bytes]) -> tuple[int | None, dict[str, Any]]:
    """The index of the line, and its content. Lines of files come last."""
    for at in range(len(lines) - 1, -1, -1):
        if b'"README.md"' not in lines[at]:
            continue
        try:
            found = parse_json(lines[at], RECEIPT)
        except CheckpointError:  # validation reports a broken receipt
            continue
        if isinstance(found, dict) and found.get("file") == README and "name" not in found:
            return at, found
    return None, {}


def _record(data: bytes, said: dict[str, Any]) -> dict[str, Any]:
    """As the executor writes it: with a sha256 where the old line has one."""
    found: dict[str, Any] = {
        "file": README, "nbytes": len(data), "xxh3": xxhash.xxh3_128(data).hexdigest(),
    }  # fmt: skip
    return {**found, "sha256": sha256(data).hexdigest()} if "sha256" in said else found


def without_readme(report: Report) -> Report:
    """The report as it will be once the receipt's line of README.md is updated."""
    report.findings = [
        f for f in report.findings if not (f.where == README and f.rule in _OF_RECEIPT)
    ]
    return report


def write_card(
    folder: Path, report: Report, base_model: str | None, *, forced: bool = False
) -> str | None:
    """Write the folder's card and its line in the receipt. Returns the base model that it names. Raises
    CheckpointError if front matter, manifest or config cannot be read."""
    text = new_card(folder, report, base_model, forced=forced)
    if _read(folder, README) != text.encode():
        _replace(folder / README, text.encode())
    account_for_readme(folder)
    return base_model_of(split_front_matter(text)[0])


def rewritten(folder: Path, readme: bytes | None) -> dict[str, bytes]:
    """Files that an upload writes before it sends, with their new content; `readme` is the card, or None
    if README.md is not written."""
    now = _read(folder, README)
    found = {} if readme is None or readme == now else {README: readme}
    then = now if readme is None else readme
    receipt = None if then is None else _true_receipt(folder, then)
    return found if receipt is None else {**found, RECEIPT: receipt}


def new_card(folder: Path, report: Report, base_model: str | None, *, forced: bool = False) -> str:
    """The card that the folder should have. Raises as `write_card` does."""
    readme = folder / README
    try:
        data = _read(folder, README)
        existing = None if data is None else data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{readme}: is not UTF-8 text; fix it, or use --no-card") from error
    manifest, config = read_manifest(folder), _read_object(folder, "config.json") or {}
    # What the source said is in the card that the conversion wrote.
    said = {} if manifest is None else _loads(folder, config, manifest)
    return card(
        manifest, config, {}, report, existing, base_model=base_model, forced=forced, said=said
    )


def _loads(folder: Path, config: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Loading]:
    """Return what simulated runtimes say; nothing of a folder whose headers cannot be read, which the
    report on it says."""
    try:
        found = Checkpoint.open(folder, follow_links=True)
    except CheckpointError:
        return {}
    return loads(config, {name: source.type for name, source in found.items()}, manifest)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """qconvert.json, None if missing. Raises CheckpointError if it lacks a key that cards need."""
    file = folder / MANIFEST
    found = _read_object(folder, MANIFEST, 4 * SMALL)
    if found is None:
        return None
    lacks = [key for key, kind in _OF_MANIFEST.items() if not isinstance(found.get(key), kind)]
    if not lacks:
        steps = found["passes"]
        lacks += [f"identity.{k}" for k in ("qconvert",) if k not in found["identity"]]
        lacks += [f"bytes.{k}" for k in _SIZES if not isinstance(found["bytes"].get(k), int)]
        for number, step in enumerate(steps):
            keys = step if isinstance(step, dict) else {}
            lacks += [f"passes[{number}].{k}" for k in _OF_STEP if k not in keys]
    if lacks:
        raise CheckpointError(
            f"{file}: lacks {', '.join(lacks[:6])}, so qconvert did not write it like this; convert "
            "again, or remove it"
        )
    return checked_manifest(found, file)


def _read(folder: Path, name: str, limit: int = SMALL) -> bytes | None:
    """A file of the folder, None if missing. Links out of the folder were checked when the files to send
    were listed."""
    try:
        return read_inside(folder, name, limit, follow_links=True)
    except FileNotFoundError:
        return None


def _read_object(folder: Path, name: str, limit: int = SMALL) -> dict[str, Any] | None:
    """A JSON object from a file, None if the file is missing. Raises CheckpointError for other
    content."""
    data = _read(folder, name, limit)
    return None if data is None else parse_object(data, folder / name)


def _replace(file: Path, data: bytes) -> None:
    """Replace a file atomically; a hard link of another folder to it keeps the old content."""
    partial = file.with_name(file.name + ".partial")
    with writing(file), partial.open("wb") as stream:
        if file.exists():  # who may not read the old one may not read the new one
            os.fchmod(stream.fileno(), file.stat().st_mode & 0o777)
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)


# The card that a conversion writes, before anything is validated.

_RULE = "card: replaced by what was made, and of what"


def with_card(plan: Plan, base_model: str | None = None) -> Plan:
    """The plan with a model card as its README.md, in place of the source's, whose front matter is kept
    as far as it is still true. `base_model` is the source's id on the Hub; None: what the source names.

    Call it last, on a finished plan: the text is part of the fingerprint.
    """
    source = source_front(plan.checkpoint)
    base = base_model or base_of(plan.checkpoint.root, source)
    manifest = {"identity": {"qconvert": __version__}, **described(plan)}
    said = loads(plan.config, TypesOf(plan.tensors), manifest)
    left = {README: _RULE} if README in plan.side_files else {}
    return plan.beside(
        side_files=tuple(name for name in plan.side_files if name != README),
        dropped_files={**left, **plan.dropped_files},
        new_files={
            **plan.new_files,
            README: card(manifest, plan.config, source, base_model=base, said=said),
        },
    )


def source_front(checkpoint: Checkpoint) -> dict[str, Any]:
    """Front matter of the source's README.md, empty if it cannot be read: validation reports that
    (QC059), and the conversion continues."""
    if README not in checkpoint.side_files:
        return {}
    try:
        return split_front_matter((checkpoint.read(README) or b"").decode("utf-8", "replace"))[0]
    except CheckpointError:
        return {}
