"""Validators: what they are, how they are found, and the report that ends a validation.

A validator is a file in `validators/` with a `VALIDATOR`. It reads a finished folder (and its
source, where given) and yields findings; it never imports what made the folder. The report says
what was proved and, as plainly, what was not looked at.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from qconvert.checkpoint import RECEIPT, WORK_DIR, Checkpoint
from qconvert.errors import CheckpointError
from qconvert.family import discover
from qconvert.stages import open_source

Need = Literal["source", "receipt", "data", "amx", "kt-kernel", "pair"]

_MISSING: dict[str, str] = {
    "source": "give --against SRC",
    "receipt": f"the folder has no {RECEIPT}",
    "data": "give --level full",
    "pair": "give --pair GPU",
    "kt-kernel": "kt-kernel is not installed: pip install --no-deps kt-kernel",
}


class NotChecked(Exception):
    """Raised by a validator, before its first finding, that cannot judge this folder on this machine;
    its text is the reason."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong. `rule` is a stable id; `where` a tensor or file."""

    rule: str
    severity: Literal["error", "warning"]
    where: str
    message: str


@dataclass(frozen=True)
class Folder:
    """A finished folder as validators see it: its checkpoint, its receipt's lines, the source it is
    said to be made from, and the folder on the GPU side it is to be served with."""

    checkpoint: Checkpoint
    source: Checkpoint | None = None
    partner: Checkpoint | None = None

    @cached_property
    def receipt(self) -> tuple[Mapping[str, Any], ...] | None:
        """Receipt lines, None where there is none. Raises CheckpointError where it is broken."""
        file = self.checkpoint.root / RECEIPT
        if not file.is_file():
            return None
        lines = []
        for number, raw in enumerate(file.read_bytes().splitlines(), 1):
            try:
                line = json.loads(raw)
            except ValueError as error:
                raise CheckpointError(f"{file}:{number}: is not valid JSON: {error}") from error
            if not _is_receipt_line(line):
                raise CheckpointError(f"{file}:{number}: is no receipt of a tensor or file")
            lines.append(line)
        return tuple(lines)


_OF_TENSORS: Mapping[str, type] = {
    "name": str, "dtype": str, "shape": list, "file": str, "offset": int, "nbytes": int,
    "xxh3": str, "sources": list,
}  # fmt: skip
_OF_FILES: Mapping[str, type] = {"file": str, "nbytes": int}
_OF_SOURCES: Mapping[str, type] = {"name": str, "start": int, "stop": int, "xxh3": str}


def _has(line: Any, kinds: Mapping[str, type]) -> bool:
    return isinstance(line, dict) and all(isinstance(line.get(k), t) for k, t in kinds.items())


def _is_receipt_line(line: Any) -> bool:
    """Whether validators may rely on a line's keys; what they say is for the rules to judge."""
    if not isinstance(line, dict) or "name" not in line:
        return _has(line, _OF_FILES)
    return _has(line, _OF_TENSORS) and all(_has(part, _OF_SOURCES) for part in line["sources"])


class Validator(Protocol):
    """`proves` is one phrase for the report; `needs` what must be at hand. May raise NotChecked."""

    name: str
    proves: str
    needs: frozenset[Need]

    def __call__(self, folder: Folder) -> Iterator[Finding]: ...


@dataclass
class Report:
    """Findings, what was proved, what was not looked at."""

    findings: list[Finding] = field(default_factory=list)
    proved: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "findings": [
                {"rule": f.rule, "severity": f.severity, "where": f.where, "message": f.message}
                for f in self.findings
            ],
            "proved": self.proved,
            "not_checked": self.not_checked,
        }


def validators() -> list[Validator]:
    """Every validator, in file order. An import error is fatal and names the file."""
    return [
        module.VALIDATOR
        for module in discover("qconvert.validators")
        if hasattr(module, "VALIDATOR")
    ]


def validate_folder(
    out: Path, against: str | None = None, *, full: bool = False, pair: str | None = None
) -> Report:
    """Run every validator that has what it needs. A folder that cannot even be opened is a finding
    (QC001); a source, or the GPU side `pair`, that cannot be is the caller's error and raises
    CheckpointError."""
    report = Report()
    if (out / WORK_DIR).is_dir():
        report.findings.append(
            Finding(
                "QC002", "error", str(out), f"{WORK_DIR}/ is there: a conversion is unfinished; "
                "run its command again, or qconvert clean",
            )
        )  # fmt: skip
    source = open_source(against) if against is not None else None
    partner = open_source(pair) if pair is not None else None
    try:
        folder = Folder(Checkpoint.open(out), source, partner)
        # Read now: what validators rest on, and what may be broken.
        _ = folder.checkpoint.manifest, folder.checkpoint.quantization_configs
        have: set[Need] = set()
        if source is not None:
            have.add("source")
        if folder.receipt is not None:
            have.add("receipt")
        if full:
            have.add("data")
        if partner is not None:
            have.add("pair")
        if "amx" in (folder.checkpoint.manifest or {}):
            have.add("amx")
        if importlib.util.find_spec("kt_kernel") is not None:
            have.add("kt-kernel")
    except CheckpointError as error:
        report.findings.append(Finding("QC001", "error", str(out), str(error)))
        report.not_checked.append("everything else: the folder cannot be opened")
        return report
    if partner is not None and "amx" not in have:
        raise CheckpointError(
            f"{out}: --pair goes with the folder of the CPU's experts, and this is none; exchange them"
        )
    report.proved.append("headers, index and file sizes agree")
    for validator in validators():
        lacking = sorted(validator.needs - have)
        if "amx" in lacking:  # another kind of folder: there is nothing to say of it
            continue
        why, found = ", ".join(_MISSING[need] for need in lacking), []
        if not lacking:
            try:
                found = list(validator(folder))
            except NotChecked as reason:
                why = str(reason)
        if why:
            report.not_checked.append(f"{validator.proves} ({why})")
            continue
        report.findings += found
        if not any(finding.severity == "error" for finding in found):
            report.proved.append(validator.proves)
    return report
