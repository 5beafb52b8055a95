"""Answer of the runtime that `--for` names: what it would do with the folder, by the simulator of its
loader, or by its own loader (`--loader`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import PlanError
from qconvert.core.family import draft_algorithm
from qconvert.core.manifest_keys import DRAFT
from qconvert.core.shown import count, format_size
from qconvert.runtimes.advisories import advisories
from qconvert.runtimes.loader.ask import FILES
from qconvert.runtimes.loading.load_weights import SimulatedLoad
from qconvert.runtimes.loading.setting import NotSimulated
from qconvert.runtimes.serving import Answer, NotKnown, Offered, asked, class_of, drafted
from qconvert.validation.findings import Finding, OnlyRead, Proved, Severity, Skipped
from qconvert.validation.runner import Folder, NotChecked, Yield, validator
from qconvert.validators.reading.matrices import gdn_groups_here
from qconvert.validators.reading.model import stage_of

_MOST = 3  # places named of one kind


@validator("the runtime is not known to serve such a folder wrong", "model", "runtime")
def known_errors(folder: Folder) -> Iterator[Yield]:
    """Errors of the version that answers are findings; those of others are said."""
    serving, config = folder.request.serving, folder.checkpoint.config
    assert serving is not None
    here = serving.answering
    answers = advisories(here, config)
    for row in advisories(serving.consumer, config):
        text = f"{row.what} ({row.source})"
        if row.setting:
            yield Skipped(f"that {row.setting} is not set: {text}")
        elif row in answers:
            yield Finding("QC134", "warning", "config.json", f"{serving.who}: {text}")
        else:
            yield OnlyRead(f"{here.name}: {text}; {here.version} is none of them")


@validator("the runtime loads the folder whole", "model", "runtime")
def for_runtime(folder: Folder) -> Iterator[Yield]:
    serving = folder.request.serving
    assert serving is not None
    checkpoint = folder.checkpoint
    tensors = {name: source.type for name, source in checkpoint.items()}
    try:
        stage = stage_of(checkpoint)
        place = None if stage is None else (stage.number, stage.partition)
        alone = DRAFT in (checkpoint.manifest or {}) or bool(draft_algorithm(checkpoint.config))
        files = {} if serving.loader is None else read_files(checkpoint)
        groups = gdn_groups_here(checkpoint)
        offered = Offered(checkpoint.config, tensors, groups, place, alone, files)
    except PlanError as reason:
        raise NotChecked(str(NotKnown(class_of(checkpoint.config), str(reason)))) from None
    answer = asked(serving.consumer, offered, serving.setting, loader=serving.loader)
    if isinstance(answer, NotKnown):
        raise NotChecked(str(answer))
    draft = None
    try:
        if not alone:
            draft = drafted(offered, answer, serving.consumer, loader=serving.loader)
    except NotSimulated as reason:
        yield OnlyRead(f"the draft is not simulated: {reason}")
    who = serving.who
    how = (
        "simulated from headers" if serving.loader is None else f"headers given to {serving.loader}"
    )
    yield OnlyRead(f"{who} at {answer.setting}: {how}, no kernel was run")
    yield from findings(answer)
    if answer.whole:
        size = format_size(answer.nbytes)
        by = "simulated" if serving.loader is None else "by its own loader"
        yield Proved(f"{who} loads the folder whole: {size} of weights on the fullest rank, {by}")
    if draft is not None:
        yield from _of_draft(draft)
        if draft.whole:
            size = format_size(draft.nbytes)
            yield Proved(f"{who} loads the folder's draft model: {size} of weights more")


def findings(answer: Answer) -> Iterator[Finding]:
    """Findings about a load; warnings where an option of the runtime mends it."""
    severity: Severity = "warning" if answer.required_flag else "error"
    cure = f"; with {answer.required_flag} it loads whole" if answer.required_flag else ""
    cure = f"; {answer.cure}" if answer.cure else cure
    rank = answer.refused
    if rank is not None and rank.refused is not None:
        where = f"{rank.refused.where}: " if rank.refused.where else ""
        text = f"{_at(rank)}: {where}{rank.refused.why}{cure}"
        yield Finding("QC130", severity, rank.refused.where or "config.json", text)
        return
    for rank in answer.ranks:
        missing = [*rank.missing, *(name for name in rank.empty if name not in rank.missing)]
        if missing:
            what = f"{count(len(missing), 'parameter')} stay unwritten"
            text = f"{_at(rank)}: {what}: {_some(missing)}{cure}"
            yield Finding("QC131", severity, missing[0], text)
        if rank.misread:
            first, why = next(iter(rank.misread.items()))
            text = f"{_at(rank)}: {count(len(rank.misread), 'tensor')} read wrong: {why}{cure}"
            yield Finding("QC133", severity, first, text)
        if missing or rank.misread:
            break  # other ranks say the same
    if answer.ignored:
        shared = any(".shared_expert" in name for name in answer.ignored)
        fused = shared and any(rank.shared_fused for rank in answer.ranks)
        why = " (shared experts are loaded as routed ones)" if fused else ""
        what = count(len(answer.ignored), "tensor")
        text = f"{what} reach no parameter{why}: {_some(answer.ignored)}{cure}"
        yield Finding("QC132", severity, answer.ignored[0], text)


def _of_draft(answer: Answer) -> Iterator[Finding]:
    """Findings about the draft: warnings, because the model is served without it, too."""
    for finding in findings(answer):
        text = f"draft, {finding.message}"
        yield replace(finding, severity="warning", message=text)


def _at(rank: SimulatedLoad) -> str:
    at = rank.setting
    stage = f", stage {at.stage} of {at.pp}" if at.pp > 1 else ""
    return f"rank {at.rank} of {at.tp}{stage}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more


def read_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Small files that a runtime's own loader reads beside config.json."""
    found = {name: checkpoint.read(name) for name in FILES}
    return {name: data for name, data in found.items() if data is not None}
