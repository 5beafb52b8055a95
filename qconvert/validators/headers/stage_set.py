"""All stages of a split as one set: each is validated by itself, then what no stage can show alone: that
the set is complete and of one split (QC120), that tensors are in the stages where a runtime looks for
them, and in no others (QC121), and that together they used every tensor of the source (QC122)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.open import open_source, open_stages, receipt_of, stage_folders
from qconvert.core.errors import CheckpointError, PlanError
from qconvert.runtimes.pipeline import RUNTIMES, owners_of
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Report, Request, validate_folder

if TYPE_CHECKING:
    from qconvert.validation.workers import Progress

_MOST = 20


def validate_set(
    parent: Path,
    against: str | None = None,
    *,
    request: Request,
    progress: Progress | None = None,
    follow_links: bool = False,
) -> Report:
    """Validate every stage folder in `parent`, and the set. A finding or claim about one stage
    names that stage in its text. Raises as `validate_folder` does."""
    folders = stage_folders(parent)
    parts = [
        validate_folder(
            folder, against, request=request, progress=progress, follow_links=follow_links
        )
        for folder in folders
    ]
    names = [folder.name for folder in folders]
    report = _merged(parent, names, parts)
    findings = list(_set_findings(parent, folders, against, follow_links=follow_links))
    report.findings += findings
    if not findings:
        report.proved.append("the stages are one complete split: every layer once, no tensor in two but "
                             "those that runtimes expect in several")  # fmt: skip
    return report


def _merged(parent: Path, names: Sequence[str], parts: Sequence[Report]) -> Report:
    about = {**parts[0].about, "folder": str(parent), "stages": ", ".join(names)}
    merged = Report(about=about)
    for name, part in zip(names, parts, strict=True):
        merged.findings += [replace(f, where=_where(f, parent, name)) for f in part.findings]
        merged.measures += part.measures
        merged.tables += [replace(table, title=f"{name}: {table.title}") for table in part.tables]
    for key in ("proved", "read", "not_checked"):
        texts = [getattr(part, key) for part in parts]
        setattr(merged, key, list(_claims(names, texts)))
    return merged


def _where(finding: Finding, parent: Path, name: str) -> str:
    """A tensor or file, named with its stage."""
    where = finding.where.removeprefix(f"{parent}/").removeprefix(name).lstrip("/")
    return f"{name}: {where}" if where else name


def _claims(names: Sequence[str], texts: Sequence[Sequence[str]]) -> Iterator[str]:
    """Findings that hold for all stages once, and those of some with their names."""
    known = Counter(text for each in texts for text in dict.fromkeys(each))
    for text, number in known.items():
        if number == len(names):
            yield text
        else:
            some = [name for name, each in zip(names, texts, strict=True) if text in each]
            yield f"{text} [{', '.join(some)}]"


def _set_findings(
    parent: Path, folders: Sequence[Path], against: str | None, *, follow_links: bool
) -> Iterator[Finding]:
    try:
        whole = open_stages(parent, follow_links=follow_links)
        opened = [Checkpoint.open(folder, follow_links=follow_links) for folder in folders]
        receipts = [receipt_of(checkpoint) for checkpoint in opened]
    except CheckpointError as error:
        yield Finding("QC120", "error", str(parent), str(error))
        return
    yield from _misplaced(opened, whole)
    if against is not None:
        yield from _unused(opened, receipts, open_source(against, follow_links=follow_links))


def _misplaced(opened: Sequence[Checkpoint], whole: Checkpoint) -> Iterator[Finding]:
    """The runtime is not recorded, so the one whose rules fit best is used for the rest."""
    facts = (opened[0].manifest or {})["stage"]
    held: dict[str, set[int]] = {}
    for checkpoint in opened:
        stage = (checkpoint.manifest or {})["stage"]
        head = "lm_head.weight" if "head_from_embeddings" in stage else None
        for name in checkpoint:
            if name != head:
                held.setdefault(name, set()).add(stage["number"])
    wrong: dict[str | None, dict[str, str]] = {}
    for runtime in RUNTIMES:
        found = wrong.setdefault(runtime, {})
        for name, numbers in held.items():
            try:
                wanted = set(owners_of(whole, name, facts["partition"], runtime))
            except PlanError as error:
                found[name] = str(error)
                continue
            if numbers != wanted:
                found[name] = f"is in {_listed(numbers)}, expected in {_listed(wanted)}"
    best = min(wrong.values(), key=len)
    for name in list(best)[:_MOST]:
        yield Finding("QC121", "error", name, best[name])


def _listed(numbers: set[int]) -> str:
    return f"stage{'' if len(numbers) == 1 else 's'} {', '.join(map(str, sorted(numbers)))}"


def _unused(
    opened: Sequence[Checkpoint],
    receipts: Sequence[Sequence[Mapping[str, Any]]],
    source: Checkpoint,
) -> Iterator[Finding]:
    used = {
        part["name"]
        for lines in receipts
        for line in lines
        for part in line.get("sources", ())
        if isinstance(part, Mapping) and isinstance(part.get("name"), str)
    }
    for checkpoint in opened:
        for names in (checkpoint.manifest or {})["dropped"].values():
            used.update(name for name in names if isinstance(name, str))
    lost = [name for name in source if name not in used]
    for name in lost[:_MOST]:
        yield Finding("QC122", "error", name, "no stage was made from it, and no rule dropped it")
