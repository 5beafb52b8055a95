"""Validators: what they are, how they are found, and the report of a validation.

A validator is a function in a file of `validators/`, or that file's `VALIDATOR`. It reads a finished
folder (and its source, if given) and yields findings, measures, and tasks: work on tensor data that is
done afterwards, all validators' tasks together in the order of the layers, by worker processes. It
never imports the code that made the folder. The report says what was proved, what was only read and
what was not checked.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

from qconvert.checkpoint.adapter import adapted
from qconvert.checkpoint.checkpoint import RECEIPT, REPAIR_DIR, WORK_DIR, Checkpoint
from qconvert.checkpoint.open import grafted
from qconvert.checkpoint.ranks import parts_in
from qconvert.checkpoint.receipt import ReceiptText, parse_receipt
from qconvert.checkpoint.stated_as import FACT as STATED_AS
from qconvert.checkpoint.stated_as import as_stated
from qconvert.core.discovery import VALIDATORS, discover, held
from qconvert.core.errors import CheckpointError
from qconvert.core.extras import Extra, lacking
from qconvert.core.manifest_keys import RANK
from qconvert.core.names import KV_SCALES
from qconvert.core.profiling import phase, working
from qconvert.runtimes.serving import ServingSetup
from qconvert.validation.findings import (
    NOT_KNOWN,
    Finding,
    Measure,
    OnlyRead,
    Proved,
    Rule,
    Skipped,
    Table,
)

if TYPE_CHECKING:
    from qconvert.validation.workers import AnyTask, Progress, Result

Level = Literal["headers", "sample", "full"]
Need = Literal[
    "source", "receipt", "data", "full", "amx", "kt-kernel", "pair", "gdn", "kernels", "model",
    "nvfp4", "prepared", "files", "runtime", "kv-cache", "rank", "ranks",
    "draft-vocabulary",
]  # fmt: skip
Yield: TypeAlias = "Finding | Measure | OnlyRead | Proved | Skipped | Table | AnyTask"

_MISSING: Mapping[str, str] = {
    "source": "give --against SRC",
    "receipt": f"the folder has no {RECEIPT}",
    "data": "give --level sample or full",
    "full": "give --level full",
    "pair": "give --pair GPU",
    "kt-kernel": "kt-kernel is not installed: pip install --no-deps kt-kernel",
    "files": "the files next to the weights are not written yet",
}
# What an option proves, the option, and the extra and packages that it takes.
_OPTIONS: Mapping[str, tuple[str, str, Extra, tuple[str, ...]]] = {
    "kernels": ("Triton kernels against torch", "--kernels", "kernels", ()),
}  # fmt: skip
# Kinds of folders, not options: a validator of another kind does not apply. A `model` holds the layers
# of one, all or a stage's; `amx` folders hold only experts for CPU kernels, a `rank`'s its parameters;
# `ranks`: the source is in files of ranks, and the folder is not; `draft-vocabulary`: a draft has tokens
# of its own; `runtime`: one is named.
_KINDS = (
    "amx", "draft-vocabulary", "gdn", "kv-cache", "model", "nvfp4", "prepared", "rank", "ranks",
    "runtime",
)  # fmt: skip
# Names that only such folders have.
_NVFP4 = (".weight_scale_2", ".weight_global_scale")
# Keys of a quantization block that state scales of a KV cache.
KV_STATED = ("kv_cache_scheme", "kv_cache_quant_algo")
_SAMPLE = 64

# Where validators are. The kernels' own modules are imported where they run.
PACKAGES = (
    "qconvert.validators.headers", "qconvert.validators.weights", "qconvert.validators.amx",
    "qconvert.validators.kernels", "qconvert.contrib.trtllm_gen",
)  # fmt: skip

# Packages whose validators all need one of these.
NEEDED_BY: Mapping[str, frozenset[Need]] = {
    "qconvert.validators.weights": frozenset({"data"}),
    "qconvert.validators.amx": frozenset({"amx"}),
    "qconvert.validators.kernels": frozenset({"kernels"}),
    "qconvert.contrib.trtllm_gen": frozenset({"prepared"}),
}
# A section of the page of rules.
_SECTION = re.compile(r"^## (\S+): (.+)\n\nCause: (.+)\n\nFix: (.+)\n", re.MULTILINE)
T = TypeVar("T")


class NotChecked(Exception):
    """Raised by a validator, before its first finding, that cannot judge this folder on this machine;
    its text is the reason."""


@dataclass(frozen=True, slots=True)
class Request:
    """Request for a validation. `level` headers reads no tensor data, sample a part of each kind, full
    all. `layers` are those that the kernels are run on (None: a few). `jobs` worker processes, None for
    as many as the machine has cores and the work needs; `memory` bytes they may use together. `serving`:
    the runtime that is to load the folder."""

    level: Level = "headers"
    layers: tuple[int, ...] | None = None
    kernels: bool = False
    jobs: int | None = None
    memory: int | None = None
    serving: ServingSetup | None = None


@dataclass(frozen=True)
class Folder:
    """A finished folder as validators see it: its checkpoint, its receipt's lines, the source it is
    said to be made from, and the folder on the GPU side it is to be served with.

    `planned` folders are not on disk yet: there are headers and config, but no files. A validator that
    opens files of a folder needs `files`. Of a `staged` one all files are made, and nothing is
    published: its receipt has just been written from what was computed, and is not read again."""

    checkpoint: Checkpoint
    source: Checkpoint | None = None
    partner: Checkpoint | None = None
    request: Request = Request()
    planned: bool = False
    staged: bool = False

    def some(self, things: Sequence[T], most: int = _SAMPLE) -> Sequence[T]:
        """All of them at level full, else at most that many, evenly spaced, including first and
        last."""
        if self.request.level == "full" or len(things) <= most:
            return things
        return [things[i * (len(things) - 1) // (most - 1)] for i in range(most)]

    @property
    def receipt(self) -> tuple[Mapping[str, Any], ...] | None:
        """Receipt lines, None if there is none. Raises CheckpointError if it is broken."""
        return None if self.receipt_text is None else self.receipt_text.lines

    @cached_property
    def receipt_text(self) -> ReceiptText | None:
        """The receipt with its seal, None if there is none. Raises CheckpointError if it is
        broken."""
        if self.planned or self.staged:
            return None
        data = self.checkpoint.read(RECEIPT, self.checkpoint.receipt_limit)
        return None if data is None else parse_receipt(data, self.checkpoint.root / RECEIPT)


class Validator(Protocol):
    """`proves` is one phrase for the report; `needs` what must be available. May raise NotChecked."""

    @property
    def name(self) -> str: ...

    @property
    def proves(self) -> str: ...

    @property
    def needs(self) -> frozenset[Need]: ...

    def __call__(self, folder: Folder) -> Iterator[Yield]: ...


@dataclass(frozen=True, slots=True)
class Check:
    """A validator that is one function."""

    name: str
    proves: str
    needs: frozenset[Need]
    check: Callable[[Folder], Iterator[Yield]]

    def __call__(self, folder: Folder) -> Iterator[Yield]:
        return self.check(folder)


def validator(proves: str, *needs: Need) -> Callable[[Callable[[Folder], Iterator[Yield]]], Check]:
    """Make the validator of its name of a function."""
    return lambda check: Check(check.__name__, proves, frozenset(needs), check)


@dataclass
class Report:
    """The result of a validation. `proved` was shown from content, `read` only read in what the folder
    states about itself, `not_checked` was not checked. `about` says what was validated: `folder`,
    `against`, `model`, `format`, `level`, in that order, as far as known.
    `beside` is the report of another folder of the same source, to compare this one with. `compared`:
    there is a source or a receipt, so that values read were held to others."""

    about: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    proved: list[str] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    measures: list[Measure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    beside: Report | None = None
    compared: bool = True

    @property
    def errors(self) -> int:
        return sum(finding.severity == "error" for finding in self.findings)

    @property
    def warnings(self) -> int:
        return len(self.findings) - self.errors

    @property
    def not_known(self) -> str:
        """Return what `--for` asked and nobody knows, "" where it was answered or not asked."""
        for text in self.not_checked:
            at = text.find(f"({NOT_KNOWN}")
            if at >= 0:
                return text[at:].strip("()")
        return ""

    @property
    def exit_code(self) -> int:
        """Of the command: 3 for errors, 5 where what `--for` asked is not known."""
        return 3 if self.errors else 5 if self.not_known else 0


def validators() -> list[Validator]:
    """Every validator, in file order. An import error is fatal and names the file."""
    return list(validators_of(discover(*PACKAGES, group=VALIDATORS)))


def validators_of(modules: Iterable[Any]) -> Iterator[Validator]:
    """Those that modules hold as VALIDATOR or VALIDATORS, else those that their functions are."""
    for module in modules:
        named = list(held((module,), "VALIDATOR"))
        yield from named or (
            one for one in vars(module).values()
            if isinstance(one, Check) and one.check.__module__ == module.__name__
        )  # fmt: skip


def _validators_with(have: set[Need]) -> list[Validator]:
    """Those that need no more than what is there, in the same order. Packages that need more are not
    imported: of 62 modules, which take 0.15 s of CPU, a planned model needs 24 (0.06)."""
    packages = [name for name in PACKAGES if name not in NEEDED_BY or NEEDED_BY[name] & have]
    modules = discover(*packages, group=VALIDATORS)
    return [one for one in validators_of(modules) if one.needs <= have]


def rules() -> dict[str, Rule]:
    """Every rule by id, in order: those of validators/RULES.md, and the `RULES` that modules of other
    packages have. Raises CheckpointError if two have one id."""
    text = (Path(__file__).parents[1] / "validators" / "RULES.md").read_text(encoding="utf-8")
    found: dict[str, Rule] = {}
    others = (r for module in discover(group=VALIDATORS) for r in getattr(module, "RULES", ()))
    for rule in (*(Rule(*fields) for fields in _SECTION.findall(text)), *others):
        if rule.id in found:
            raise CheckpointError(f"rule {rule.id} is defined twice")
        found[rule.id] = rule
    return dict(sorted(found.items()))


@phase("rules")
def validate_folder(
    out: Path,
    against: str | None = None,
    *,
    request: Request = Request(),
    pair: str | None = None,
    draft: str | None = None,
    adapters: Sequence[str] = (),
    progress: Progress | None = None,
    follow_links: bool = False,
) -> Report:
    """Run every validator that has what it needs, links as for Checkpoint.open. A folder that cannot
    be opened is a finding (QC001); a source, the GPU side `pair`, the folder `draft` of a draft that was
    grafted to the source, or one of `adapters` that were merged into it, that cannot be opened is the
    caller's error and raises CheckpointError."""
    from qconvert.checkpoint.open import open_source
    from qconvert.checkpoint.torchao import translated

    if not out.exists():
        raise CheckpointError(f"{out}: no such folder")
    report = Report(about={"folder": str(out)})
    if (out / WORK_DIR).is_dir():
        report.findings.append(
            Finding(
                "QC002", "error", str(out), f"{WORK_DIR}/ exists: a conversion is unfinished; "
                "run its command again, or qconvert clean",
            )
        )  # fmt: skip
    if os.path.lexists(out / REPAIR_DIR):
        report.findings.append(
            Finding(
                "QC002", "error", str(out), f"{REPAIR_DIR} exists: a repair is unfinished; run "
                "qconvert repair",
            )
        )  # fmt: skip
    opened = partial(open_source, follow_links=follow_links)
    source = opened(against) if against is not None else None
    if source is not None and draft is not None:
        source = grafted(source, opened(draft))
    if source is not None and adapters:
        source = adapted(source, adapters)
    partner = opened(pair) if pair is not None else None
    if against is not None:
        report.about["against"] = against
    report.about["level"] = request.level
    try:
        here = translated(Checkpoint.open(out, follow_links=follow_links))
        if source is not None and source.reading is None:
            source = replace(source, asked=here.reading)  # which may be the manifest's word
        scheme = (here.manifest or {}).get(STATED_AS)
        if source is not None and scheme and not source.quantization_configs:
            source = as_stated(source, scheme)
        folder = Folder(here, source, partner, request)
        have = _at_hand(folder)
        report.compared = source is not None or "receipt" in have
        report.about["model"] = folder.checkpoint.model_line
    except CheckpointError as error:
        report.findings.append(Finding("QC001", "error", str(out), str(error)))
        report.not_checked.append("everything else: the folder cannot be opened")
        return report
    passes = (here.manifest or {}).get("passes", ())
    if source is not None and any(step.get("name") == "apply_delta" for step in passes):
        raise CheckpointError(
            f"{out}: a delta and an older checkpoint made it, so it is compared with neither alone: "
            f"qconvert diff NEW {out} compares it with the checkpoint that the delta was made of, and "
            "qconvert validate without --against its bytes with their hashes"
        )
    if partner is not None and "amx" not in have:
        raise CheckpointError(
            f"{out}: --pair needs the folder of the CPU's experts, and this is not one; exchange the two"
        )
    report.proved.append("headers, index and file sizes agree")
    ran = _gathered(folder, have, report)
    for number, item in _work(folder, ran, progress):
        ran[number].keep(item, report)
    _conclude(ran, report, request.level)
    return report


def _work(
    folder: Folder, ran: Sequence[Ran], progress: Progress | None
) -> Iterator[tuple[int, Result]]:
    """Do all validators' tasks. Results come in the order of the layers, with the number of the
    validator."""
    from qconvert.validation.workers import run_tasks

    tasks = [(number, task) for number, run in enumerate(ran) for task in run.tasks]
    if not tasks:
        return
    source = folder.source
    sides = (folder.checkpoint.shards, source.shards if source is not None else ())
    jobs, memory = folder.request.jobs, folder.request.memory
    with phase("weights"), working():
        yield from run_tasks(tasks, sides, jobs=jobs, memory=memory, progress=progress)


def judge_headers(folder: Folder) -> list[Finding]:
    """Return what the header rules find in a folder, which may be a planned one; source and partner are
    used if there are any. Only headers and configs are read. Raises CheckpointError if the files that
    the rules rely on are broken."""
    report, ran = Report(), list[Ran]()
    for validator in _validators_with(_at_hand(folder)):
        ran.append(Ran(validator))
        _gather(partial(validator, folder), ran[-1], report)
    assert not any(run.tasks for run in ran), "headers alone were asked for"
    return [finding for run in ran for finding in run.findings]


def validate_kernels() -> Report:
    """The Triton kernels on random weights, without a folder."""
    report = Report(about={"level": "kernels on random weights"})
    ran = []
    for validator in validators():
        random = getattr(validator, "random", None)
        if random is None:
            continue
        ran.append(Ran(validator))
        _gather(random, ran[-1], report)
    _conclude(ran, report)
    return report


def _at_hand(folder: Folder) -> set[Need]:
    """Return what validators may need and have. Raises CheckpointError if the files they rely on are
    broken."""
    checkpoint, request = folder.checkpoint, folder.request
    manifest, stated = checkpoint.manifest, checkpoint.quantization_configs
    of_model = {"amx", RANK}.isdisjoint(manifest or {})
    found: dict[Need, bool] = {
        "source": folder.source is not None,
        "receipt": folder.receipt is not None,
        "data": request.level != "headers",
        "full": request.level == "full",
        "pair": folder.partner is not None,
        "amx": "amx" in (manifest or {}),
        "model": of_model,
        "gdn": checkpoint.role_index.dims.gdn is not None and of_model,
        "nvfp4": any(end.endswith(_NVFP4) for end in checkpoint.ends),
        "kv-cache": any(end.endswith(KV_SCALES) for end in checkpoint.ends)
        or "kv_scale" in (manifest or {})
        or any(one.block.get(key) for one in stated for key in KV_STATED),
        "prepared": checkpoint.says_prepared,
        "rank": RANK in (manifest or {}),
        "draft-vocabulary": "d2t" in checkpoint or "draft_vocab_size" in checkpoint.config,
        "ranks": folder.source is not None
        and bool(parts_in(folder.source.sources))
        and not parts_in(checkpoint.sources),
        "kt-kernel": importlib.util.find_spec("kt_kernel") is not None,
        "kernels": request.kernels,
        "files": not folder.planned,
        "runtime": request.serving is not None,
    }
    return {need for need, there in found.items() if there}


@dataclass
class Ran:
    """One validator's run: what it found, what it proved (None: its own phrase), its tasks, and why it
    stopped."""

    validator: Validator
    findings: list[Finding] = field(default_factory=list)
    proved: list[str] = field(default_factory=list)
    tasks: list[AnyTask] = field(default_factory=list)
    stopped: str = ""

    def keep(self, item: Yield, report: Report) -> None:
        if isinstance(item, Finding):
            self.findings.append(item)
        elif isinstance(item, Proved):
            self.proved.append(item.text)
        elif isinstance(item, Measure):
            report.measures.append(item)
        elif isinstance(item, OnlyRead):
            report.read.append(item.text)
        elif isinstance(item, Skipped):
            report.not_checked.append(item.text)
        elif isinstance(item, Table):
            report.tables.append(item)
        else:
            self.tasks.append(item)


def _gather(call: Callable[[], Iterator[Yield]], run: Ran, report: Report) -> None:
    try:
        for item in call():
            run.keep(item, report)
    except NotChecked as reason:
        run.stopped, run.tasks = str(reason), []


def _gathered(folder: Folder, have: set[Need], report: Report) -> list[Ran]:
    """Findings of all validators in headers, and their tasks."""
    ran: list[Ran] = []
    for validator in validators():
        missing = sorted(validator.needs - have)
        if any(kind in missing for kind in _KINDS):
            continue
        asked = [_not_asked(need) for need in missing if need in _OPTIONS]
        if asked:  # once for each option, however many validators wait for it
            report.not_checked += [text for text in asked if text not in report.not_checked]
            continue
        if missing:
            why = ", ".join(_MISSING[need] for need in missing)
            report.not_checked.append(f"{validator.proves} ({why})")
            continue
        ran.append(Ran(validator))
        _gather(partial(validator, folder), ran[-1], report)
    return ran


def _not_asked(need: Need) -> str:
    """Return what an option would prove, and what it takes on this machine."""
    what, option, extra, packages = _OPTIONS[need]
    missing = lacking(extra, *packages)
    return f"{what} (give {option}{f'; {missing}' if missing else ''})"


def _conclude(ran: Sequence[Ran], report: Report, level: Level = "headers") -> None:
    """Return what was proved: every validator that found no error and checked something."""
    for run in ran:
        proves = run.validator.proves
        report.findings += run.findings
        reads = "data" in run.validator.needs
        if run.stopped:
            report.not_checked.append(f"{proves} ({run.stopped})")
        elif run.findings:  # a warning also says that something is wrong
            continue
        elif reads and not (run.tasks or run.proved):
            # A model without a tied head has none to check; one without weights to compare has.
            if run.validator.needs & {"source", "receipt"}:
                report.not_checked.append(f"{proves} (nothing to check was found)")
        else:
            partly = " (in a sample)" if reads and level == "sample" else ""
            report.proved += [f"{text}{partly}" for text in run.proved or [proves]]
