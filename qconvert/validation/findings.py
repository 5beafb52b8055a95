"""Reports of validators: findings, measures, things only read, tables; and for a plan, its verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, log10, nan
from typing import Any, Literal

from qconvert.core.shown import printable

Severity = Literal["error", "warning"]
# How the report begins to say that a runtime's loader was asked about (`--for`) and has no answer.
NOT_KNOWN = "not known for "


@dataclass(frozen=True, slots=True)
class Finding:
    """One error or warning. `rule` is a stable id; `where` a tensor or file."""

    rule: str
    severity: Severity
    where: str
    message: str


@dataclass(frozen=True, slots=True)
class Rule:
    """The meaning of a finding's id: `title` says what is wrong, `cause` how folders come to be so,
    `fix` what to do about it, each a sentence or two. Those of this package stand in
    validators/RULES.md, those of another in the `RULES` of its validator's module."""

    id: str
    title: str
    cause: str
    fix: str


@dataclass(frozen=True, slots=True)
class Measure:
    """Distance of one matrix from the source's, as the consumer computes with each.

    `tensor` is its name in the folder; `role` what it is in the model (`gate_proj`, `q_proj`, ...),
    with the layer and expert it stands in (None: in none); `format` how the folder stores it
    (`bf16`, `fp8`, `w4a16`, `amxint4`, `amxint8`). `rms` is the norm of the difference over the
    norm of the source's weights (0: equal; inf: the source is all zero), `worst` the largest
    difference of a weight, `cosine` of the two as vectors (nan where one is all zero). `calibrated`:
    the manifest says that a calibration found its codes, which need not be the nearest.
    """

    tensor: str
    role: str
    layer: int | None
    expert: int | None
    format: str
    weights: int
    rms: float
    worst: float
    cosine: float
    calibrated: bool = False

    @property
    def sqnr(self) -> float:
        """Signal to quantization noise in dB: inf where equal, nan where nothing can be said."""
        if self.rms == 0:
            return inf
        return -20 * log10(self.rms) if 0 < self.rms < inf else nan


@dataclass(frozen=True, slots=True)
class OnlyRead:
    """A claim of the folder that nothing here proves, with what would: `linear
    attention is fused in 1 group, says qconvert.json (--against SRC --level sample proves it)`."""

    text: str


@dataclass(frozen=True, slots=True)
class Proved:
    """A proof of a validator, if that depends on the folder or the machine: it replaces the
    validator's own phrase."""

    text: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that a validator that ran could not check, and why."""

    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """Figures to show unchanged: one row of texts per line, as many as `columns`."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """Warnings for a plan's result: findings that the plan adds, none of them an error, and
    those that its source also has. `loads` says at which sizes runtimes load it, a line each."""

    added: tuple[Finding, ...] = ()
    carried: tuple[Finding, ...] = ()
    loads: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """One line per rule, for people."""
        return [
            *_summed(self.added, "of the result"),
            *_summed(self.carried, "of the source"),
        ]

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {
                "rule": finding.rule, "severity": finding.severity, "where": finding.where,
                "message": finding.message, "of_source": of_source,
            }
            for findings, of_source in ((self.added, False), (self.carried, True))
            for finding in findings
        ]  # fmt: skip


NO_FINDINGS = Verdict()


def _summed(findings: Sequence[Finding], what: str) -> Iterator[str]:
    by_rule: dict[str, list[Finding]] = {}
    for finding in findings:
        by_rule.setdefault(finding.rule, []).append(finding)
    for rule, found in by_rule.items():
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        yield printable(f"{rule} {what}{more}: {found[0].where}: {found[0].message}")
