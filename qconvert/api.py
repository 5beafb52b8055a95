"""qconvert for Python programs; the command line is built on it.

A conversion is planned from headers alone, judged by the header rules of `validate`, and carried out
in bounded memory; the folder gets a model card, a receipt and a manifest. After any interruption the
same call continues where it stopped. Errors are the classes below: all derive from QConvertError, and
their texts name the tensor or file, what was expected, what was found and what to do.

    >>> from qconvert import api
    >>> planned = api.plan("dequant-fp8", sample)
    >>> planned.tensors, planned.warnings
    (141, ())
    >>> made = api.run("dequant-fp8", sample, folder / "bf16", jobs=1)
    >>> made.tensors, made.already_done
    (141, False)
    >>> report = api.validate(made.folder, sample, level="full")
    >>> report.errors, report.warnings, report.findings
    (0, 0, [])

Importing this module loads neither torch nor numpy; they are imported where something is computed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.open import open_source, stage_folders
from qconvert.checkpoint.reading import reading_as
from qconvert.checkpoint.store import is_url, store_of, work_folder
from qconvert.core.errors import (
    CheckpointError,
    DataError,
    OutputError,
    PlanError,
    QConvertError,
    RecipeError,
    RunError,
    UsageError,
)
from qconvert.core.shown import parse_size
from qconvert.hub.card.of_plan import with_card
from qconvert.hub.destination import is_hub
from qconvert.plan.plan import Pass, Plan, run_passes
from qconvert.recipe.recipe import Recipe
from qconvert.run.cluster import check_engine
from qconvert.run.events import Events, Silent
from qconvert.run.executor import RunResult, run_together
from qconvert.run.files import Files
from qconvert.run.prepare import (
    Options,
    Prepared,
    check_disk_budget,
    disk_bytes,
    prepare_together,
    whole_result,
)
from qconvert.run.shards import DEFAULT_SHARD_BYTES
from qconvert.run.staging import publish_order
from qconvert.run.until import Until
from qconvert.run.workspace import check_apart, check_disk, check_folders_apart
from qconvert.validation import judgement
from qconvert.validation.findings import Verdict

if TYPE_CHECKING:
    from qconvert.advise.advice import Advice
    from qconvert.advise.options import Machine
    from qconvert.checkpoint.grafted import Grafted
    from qconvert.evaluate.result import Evaluation
    from qconvert.formats.base import Format
    from qconvert.hub.file_diff import FileDifference, FilesCompared
    from qconvert.hub.headers import Place
    from qconvert.hub.outlet import HubOutlet
    from qconvert.hub.publish import (
        CheckedFolder,
        Uploaded,
        check_upload,
        destination,
        refusal,
        upload,
    )
    from qconvert.passes.amx import ExpertsToAmx
    from qconvert.passes.w4a16 import ExpertsToW4A16
    from qconvert.recipe.recipe import load_recipe
    from qconvert.repair.repair import Repair
    from qconvert.run.backend import Backend
    from qconvert.run.cluster import EngineName
    from qconvert.run.delivery import Delivery
    from qconvert.run.division import Shard
    from qconvert.run.dry_run import Outlook
    from qconvert.run.in_memory import Converter
    from qconvert.run.profile import Profile, Profiling, profiled
    from qconvert.run.sharing import Share
    from qconvert.run.status import FolderStatus, ShardStatus
    from qconvert.runtimes.balance import Cut
    from qconvert.runtimes.pipeline import Runtime
    from qconvert.runtimes.serving import Serving
    from qconvert.samples.request import Calibration
    from qconvert.validation.diff import Difference
    from qconvert.validation.findings import Finding, Measure, Rule
    from qconvert.validation.runner import Level, Report, validate_kernels

__all__ = (
    "Advice",
    "Calibration",
    "CheckedFolder",
    "Checkpoint",
    "CheckpointError",
    "Converter",
    "DataError",
    "Difference",
    "Evaluation",
    "Events",
    "FileDifference",
    "FilesCompared",
    "Finding",
    "FolderStatus",
    "Format",
    "Machine",
    "Measure",
    "Outlook",
    "OutputError",
    "Pass",
    "Plan",
    "PlanError",
    "PlanOptions",
    "Planned",
    "PlannedFolder",
    "PlannedStages",
    "Profile",
    "Profiling",
    "QConvertError",
    "Recipe",
    "RecipeError",
    "Repair",
    "Report",
    "Result",
    "Rule",
    "RunError",
    "ShardStatus",
    "Share",
    "Uploaded",
    "UsageError",
    "Verdict",
    "advise",
    "carry_out",
    "check_foreseen",
    "check_upload",
    "clean",
    "convert",
    "converter",
    "destination",
    "diff",
    "diff_files",
    "evaluate",
    "formats",
    "headers_of",
    "load_recipe",
    "open_checkpoint",
    "passes",
    "plan",
    "plan_after",
    "plan_graft",
    "plan_pair",
    "plan_stages",
    "profiled",
    "reading_as",
    "recipes",
    "refusal",
    "render",
    "repair",
    "rules",
    "run",
    "status",
    "upload",
    "validate",
    "validate_kernels",
)

# What else the API names, by the module that has it: imported when it is asked for. All of it is 390
# modules, of which a conversion needs 245.
_LATER: Mapping[str, tuple[str, ...]] = {
    "advise.advice": ("Advice",),
    "advise.options": ("Machine",),
    "formats.base": ("Format",),
    "evaluate.result": ("Evaluation",),
    "hub.file_diff": ("FileDifference", "FilesCompared"),
    "hub.publish": ("CheckedFolder", "Uploaded", "check_upload", "destination", "refusal", "upload"),
    "recipe.recipe": ("load_recipe",),
    "repair.repair": ("Repair",),
    "run.in_memory": ("Converter",),
    "run.dry_run": ("Outlook",),
    "run.profile": ("Profile", "Profiling", "profiled"),
    "run.sharing": ("Share",),
    "run.status": ("FolderStatus", "ShardStatus"),
    "samples.request": ("Calibration",),
    "validation.diff": ("Difference",),
    "validation.findings": ("Finding", "Measure", "Rule"),
    "validation.runner": ("Report", "validate_kernels"),
}  # fmt: skip


if not TYPE_CHECKING:  # or a type checker would take any name for one of the API's

    def __getattr__(name: str) -> Any:
        for module, names in _LATER.items():
            if name in names:
                found = getattr(import_module(f"qconvert.{module}"), name)
                globals()[name] = found
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# A recipe, one or several passes, a recipe file, or the name of a built-in recipe.
Steps = Recipe | Pass | tuple[Pass, ...] | list[Pass] | str | Path
# Called after each write with the bytes written and the bytes to write in total.
Callback = Callable[[int, int], None]


class PlanOptions(TypedDict, total=False):
    """Keywords of `plan`, `plan_pair`, `plan_stages` and `run`.

    `memory` of all processes (bytes, or `512MiB`; None: 1 GiB, or what all cores need, at most half of
    what is free); `jobs` worker processes (None: as many cores as pay); `max_shard_size` of an output
    file (None: the recipe's, else 5 GB); `sha256` puts that hash of each file into the receipt as well;
    `verify` hashes everything that an earlier run left in `out` before continuing it; `base_model` is
    the source's repo for the model card (None: what the source names); `follow_links` follows links
    that lead out of the source. `for_run` refuses an `out` inside the source, or around it, before
    planning; a run refuses it in any case.

    `shard` (`2/8`, counted from 0; `auto`, `auto/8` for what Slurm, torchrun or Kubernetes say in the
    environment) runs that part of the units, in a folder that other machines fill at the same time,
    and publishes nothing; `finish` publishes what all shards did, and refuses a folder where units
    miss. The same call with neither does all that is left. `command` is the command line that a
    shard's journal names, for `qconvert finish`.

    `engine` ray runs the units on the nodes of the Ray cluster whose head is at `address` (`HOST:PORT`;
    `local`: one of this machine alone; None: RAY_ADDRESS, or the cluster that this machine belongs to).
    All nodes must see source and `out` under the same paths. `memory` is then what each machine gives,
    `jobs` the workers of all nodes. A program that is connected to a cluster already stays so.

    `until` (`3h50m`, `3:50:00`, seconds; since planning began) stops a run at the end of a unit, a
    calibration at that of a layer, by then as far as the longest so far tells; `Result.left_units` are
    left to the same call. It is not part of the plan.

    An `out` in an object store (`s3://BUCKET/FOLDER`) is made in a folder below `work_dir` (None: below
    `~/.cache/qconvert/outputs`), which needs the disk for it, then sent, compared and removed there.

    An `out` that is a repo on the Hub (`hf://ORG/NAME`, `@BRANCH`) gets its shards while others are
    made; each is removed from the folder below `work_dir` when it is there, and all become visible in
    one commit at the end. The repo is made where it is missing, `private` if that is asked for.

    `disk_budget` (bytes, or `60GiB`) is the most disk that a run may take. It is not part of the plan.
    One that needs more is refused, with the smallest that works; a source in a store or on the Hub takes
    none.
    """

    memory: int | str | None
    jobs: int | None
    max_shard_size: int | str | None
    sha256: bool
    verify: bool
    base_model: str | None
    follow_links: bool
    for_run: bool
    shard: str | None
    finish: bool
    command: tuple[str, ...]
    engine: EngineName
    address: str | None
    work_dir: str | Path | None
    until: Until | str | float | None
    disk_budget: int | str | None
    private: bool


@dataclass(frozen=True)
class PlannedFolder:
    """A folder that a run would make: `ready` is its plan, cut into units and files; `verdict` holds
    the warnings of the header rules. `out` is None if no folder was named; with a `url`, it is where
    the folder is made before it is sent there, or, where that is a repo on the Hub (`hf://`), while it
    is made. `private`: that repo is to be."""

    out: Path | None
    ready: Prepared
    verdict: Verdict
    url: str | None = None
    private: bool = False

    @property
    def name(self) -> str | None:
        """Return where the result will be, None if that was not said."""
        return self.url or (None if self.out is None else str(self.out))

    @property
    def delivery(self) -> Delivery | None:
        """Return how a result gets to its store, None for one that stays here or is streamed."""
        if self.url is None or is_hub(self.url):
            return None
        from qconvert.run.delivery import Delivery

        return Delivery(store_of(self.url), self.ready)

    @property
    def outlet(self) -> HubOutlet | None:
        """The repo that a result goes to while it is made, None for any other place."""
        from qconvert.hub.destination import outlet_of

        if self.url is None or not is_hub(self.url):
            return None
        return outlet_of(self.ready, self.url, private=self.private)

    @property
    def tensors(self) -> int:
        return len(self.ready.plan.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return self.ready.plan.bytes_out

    @property
    def fingerprint(self) -> str:
        """A hash of the source's headers and of all steps; paths and times do not enter it."""
        return self.ready.fingerprint

    @property
    def disk(self) -> int:
        """Upper bound of the bytes that the run writes to disk."""
        return disk_bytes(self.ready)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the source, those of the header rules about the result, and what a calibration
        lacks on this machine."""
        plan = self.ready.plan
        found = (*plan.checkpoint.warnings, *self.verdict.lines())
        if plan.calibration is None:
            return found
        from qconvert.calibrate.backend import unmet

        return (*found, *unmet(plan))


@dataclass(frozen=True)
class Planned:
    """A checked and judged plan over `source`; no tensor data has been read. Several folders are made
    `together`, from one read, or one after another."""

    source: Checkpoint
    folders: tuple[PlannedFolder, ...]
    together: bool = True

    @property
    def tensors(self) -> int:
        return sum(folder.tensors for folder in self.folders)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(folder.nbytes for folder in self.folders)

    @property
    def memory(self) -> int:
        """Bytes of memory that all processes of a run use together; with the engine ray, this one."""
        return max(folder.ready.share.total for folder in self.folders)

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text for folder in self.folders for text in folder.warnings))

    @property
    def losses(self) -> Mapping[str, int]:
        """The lossy steps, each with the number of times."""
        found: dict[str, int] = {}
        for folder in self.folders:
            for what, number in folder.ready.plan.losses().items():
                found[what] = found.get(what, 0) + number
        return found

    @property
    def parts(self) -> tuple[Planned, ...]:
        """The plan as runs: one, or one per folder."""
        if self.together:
            return (self,)
        return tuple(Planned(self.source, (folder,)) for folder in self.folders)

    @property
    def shares(self) -> tuple[Share, ...]:
        """Return what a run with `shard` does of each part; empty without."""
        if all(folder.ready.options.shard is None for folder in self.folders):
            return ()
        from qconvert.run.sharing import share_of

        found = (share_of([folder.ready for folder in part.folders]) for part in self.parts)
        return tuple(share for share in found if share is not None)

    def foreseen(self) -> tuple[Outlook, ...]:
        """Return what a run would find in each folder, and why it would refuse to start. Writes nothing.
        Empty if no folder was named."""
        return tuple(look for part in self.parts for look in _foreseen(part))


@dataclass(frozen=True)
class PlannedStages(Planned):
    """A plan of one folder per pipeline stage in `out`: the `partition`, the environment variables that
    configure a runtime for it (`NAME=VALUE`; only one if the runtime is known), notes for the user.
    `whole` is the plan before it was split. `unbalanced`: the cut that the runtime would make, and
    `balanced` the one in its place, both None unless it was asked for."""

    out: Path = Path()
    whole: Plan | None = None
    partition: tuple[int, ...] = ()
    environment: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unbalanced: Cut | None = None
    balanced: Cut | None = None

    def foreseen(self) -> tuple[Outlook, ...]:
        """First for the folder of all stages, then for each stage."""
        from qconvert.run.dry_run import Outlook

        refusals: tuple[str, ...] = ()
        try:
            self.check_out()
        except QConvertError as error:
            refusals = (str(error),)
        return (Outlook(self.out, None, 0, 0, refusals), *super().foreseen())

    def check_out(self) -> None:
        """Raise OutputError if `out` holds something else, or if its disk has no room for all stages."""
        folders = [(folder.out, folder.ready) for folder in self.folders if folder.out is not None]
        names = {out.name for out, _ in folders}
        foreign = sorted(set(os.listdir(self.out)) - names) if self.out.is_dir() else []
        if foreign:
            raise OutputError(
                f"{self.out} holds {foreign[0]}, which is not part of this split; choose an empty or "
                "new folder"
            )
        check_disk(self.out, sum(disk_bytes(ready) for out, ready in folders if not out.exists()))


@dataclass(frozen=True)
class Result:
    """A folder that a run made, or, with `dry_run`, would make.

    `nbytes` is the size of the weight files. `warnings` are from the plan, `remarks` from the run (such
    as NaN codes). `already_done`: the folder already held this result. `resumed_units` were finished by
    an earlier run. `repaired` maps files of a finished folder that were damaged to the damage; they have
    been made again. `published` is false after a run of one shard: `nbytes` are those of its units, and
    of a machine that only took part in a calibration none.
    `profile` is there if it was asked for. `url` is where in a store the result is; `folder`, where it
    was made, is gone then. Where time was over first (`until`), `left_units` are left to the same call,
    with `left_bytes` to write, and nothing is published.
    """

    folder: Path
    fingerprint: str
    tensors: int
    nbytes: int
    files: tuple[str, ...]
    warnings: tuple[str, ...]
    remarks: tuple[str, ...]
    already_done: bool
    resumed_units: int
    repaired: Mapping[str, str]
    dry_run: bool = False
    published: bool = True
    profile: Profile | None = field(default=None, compare=False)
    url: str | None = None
    left_units: int = 0
    left_bytes: int = 0

    @property
    def name(self) -> str:
        """Return where the result is."""
        return self.url or str(self.folder)


def open_checkpoint(source: str | Path, *, follow_links: bool = False) -> Checkpoint:
    """A checkpoint known from its headers: a folder, one .safetensors file, a repo on the Hub (ORG/NAME,
    hf://ORG/NAME, @REVISION), which is read by ranges where the local cache does not have it, a folder
    in a store by its URL, or the folder of all pipeline stages of a split.

    It maps each tensor's name to its place in a shard; links out of the folder are refused without
    `follow_links`. Raises CheckpointError.

        >>> checkpoint = api.open_checkpoint(sample)
        >>> print(checkpoint["lm_head.weight"].type)
        BF16 [512, 256]
        >>> checkpoint.family.name, len(checkpoint)
        ('qwen3_5', 233)
    """
    return open_source(source, follow_links=follow_links)


def plan(
    recipe: Steps,
    source: str | Path | Checkpoint,
    out: str | Path | None = None,
    **options: Unpack[PlanOptions],
) -> Planned:
    """Plan a recipe over a source, and judge the resulting folder. Reads headers only. The options are
    those of PlanOptions.

    Raises RecipeError, CheckpointError, PlanError (a pass does not apply; the result would fail
    validation; memory is too small), UsageError for an invalid size.
    """
    steps, checkpoint = _recipe(recipe), _source(source, options)
    folder, url = _placed(out, checkpoint, options)
    made = run_passes(Plan.identity(checkpoint), steps.passes)
    running, card = _streaming(_running(steps, options), [url]), options.get("base_model")
    planned = Planned(checkpoint, _judged([made], [folder], checkpoint, running, card))
    return _sent(planned, [url], options)


def plan_after(
    recipe: Steps, source: str | Path | Checkpoint, name: str, *, follow_links: bool = False
) -> Plan:
    """The plan after a pass of the recipe, before the first (`source`), or at the `end`, where it has
    been checked. For inspection: it cannot be carried out. Raises UsageError for a pass that is not in
    the recipe, and as `plan` does."""
    steps = _recipe(recipe)
    names = [step.name for step in steps.passes]
    if name not in ("source", *names, "end"):
        known = ", ".join(("source", *names, "end"))
        raise UsageError(f"--dump-after {name}: the recipe has no such pass; choose one of {known}")
    start = Plan.identity(_checkpoint(source, follow_links=follow_links))
    if name == "end":
        return run_passes(start, steps.passes)
    for step in () if name == "source" else steps.passes[: names.index(name) + 1]:
        start = step(start)
    return start


def plan_pair(
    cpu: ExpertsToAmx,
    source: str | Path | Checkpoint,
    cpu_out: str | Path,
    gpu_out: str | Path,
    *,
    gpu: ExpertsToW4A16 | None = None,
    **options: Unpack[PlanOptions],
) -> Planned:
    """As `plan`, for two folders from one read: the routed experts for KTransformers' CPU kernels, and
    the model with packed INT4 experts for its GPU side (None: round to nearest, groups of 128). Both
    may be repos on the Hub; the card of each then names the other."""
    from qconvert.hub.destination import naming_other
    from qconvert.passes.pair import pair_plans
    from qconvert.passes.w4a16 import ExpertsToW4A16

    checkpoint = _source(source, options)
    outs, urls = _placed_together((cpu_out, gpu_out), checkpoint, options)
    if options.get("for_run"):
        for out in outs:
            check_apart(out, checkpoint)
        check_folders_apart(outs[1], outs[0])
    plans = pair_plans(Plan.identity(checkpoint), cpu, gpu or ExpertsToW4A16())
    if urls[0] is not None and urls[1] is not None:  # the card of each names the other
        plans = naming_other(plans[0], urls[1]), naming_other(plans[1], urls[0])
    running = _streaming(_running(Recipe("pair", ()), options), urls)
    card = options.get("base_model")
    planned = Planned(checkpoint, _judged(plans, outs, checkpoint, running, card))
    return _sent(planned, urls, options)


def plan_graft(
    source: str | Path | Checkpoint,
    draft: str | Path | Checkpoint,
    out: str | Path | None = None,
    **options: Unpack[PlanOptions],
) -> Planned:
    """As `plan`, for the model of `source` with the draft (MTP) layers of another folder: of the
    original model, or of what the pass `extract_draft` made.

        >>> from qconvert.passes.drop import Drop
        >>> bare = api.run(Drop(what="mtp"), sample, folder / "bare", jobs=1)
        >>> planned = api.plan_graft(bare.folder, sample, folder / "grafted")
        >>> planned.tensors - bare.tensors
        48

    Raises as `plan` does: where the model has a draft already, and where names, sizes or encodings
    do not fit."""
    from qconvert.passes.drafts import GraftDraft

    checkpoint = _grafted(source, draft, options)
    folder, url = _placed(out, checkpoint, options)
    made = run_passes(Plan.identity(checkpoint), (GraftDraft(),))
    running = _streaming(_running(Recipe("graft", ()), options), [url])
    card = options.get("base_model")
    planned = Planned(checkpoint, _judged([made], [folder], checkpoint, running, card))
    return _sent(planned, [url], options)


def plan_stages(
    recipe: Steps,
    source: str | Path | Checkpoint,
    out: str | Path,
    stages: str | Sequence[int],
    runtime: str | None = None,
    *,
    link: bool = True,
    balance: bool = False,
    **options: Unpack[PlanOptions],
) -> PlannedStages:
    """As `plan`, with the result split into one folder per pipeline stage, made one after another.

    `stages` are the layers of each (`15,15,15,16`, or numbers), or a number of stages (`4`) to split as
    `runtime` would: `sglang` or `vllm`, optionally with `==VERSION`. `balance` cuts a number of stages
    so that the fullest one holds least. `link`: a shard that belongs to one
    stage unchanged is hard-linked to the source's, where possible. With a repo on the Hub as `out`
    (`hf://ORG/NAME`) each stage goes to its own, `ORG/NAME-stage-NN-of-NN`; their cards name one
    another.
    """
    from qconvert.hub.destination import (
        check_streamed,
        hub_destination,
        hub_work_folder,
        naming_stages,
        stage_repo,
    )
    from qconvert.passes.stages import split_plan, weights_of
    from qconvert.runtimes.balance import Cut, balanced
    from qconvert.runtimes.consumers import parse_consumer
    from qconvert.runtimes.pipeline import VARIABLE, check_runtime, partition_of

    steps, checkpoint = _recipe(recipe), _source(source, options)
    repo = hub_destination(str(out)) if is_hub(out) else None
    folder = _here(out, options) if repo is None else hub_work_folder(repo, options.get("work_dir"))
    if options.get("for_run"):
        check_apart(folder, checkpoint)
    running = replace(_running(steps, options), link_near=folder if link and not repo else None)
    whole = run_passes(Plan.identity(checkpoint), steps.passes)
    known: Runtime | None = check_runtime(runtime)
    unchecked = None if runtime is None else parse_consumer(runtime).unchecked
    text = stages if isinstance(stages, str) else ",".join(map(str, stages))
    partition = partition_of(text, whole.role_index.dims.num_layers, known)
    before = after = None
    if balance:
        if "," in text or known is None:
            raise UsageError(
                f"a balanced cut is of a number of stages for a runtime, not of {text}"
            )
        weights = weights_of(whole, len(partition), known)
        before, after = Cut(partition, weights.held(partition)), balanced(weights)
        partition = after.partition
    plans = [part.check() for part in split_plan(whole, partition, known)]
    urls: list[str | None] = [None for _ in plans]
    if repo is not None:
        check_streamed(repo, options.get("shard"), options.get("engine", "local"))
        repos = [stage_repo(repo, part.facts["stage"]["folder"]) for part in plans]
        plans = [naming_stages(part, [each.id for each in repos]) for part in plans]
        urls = [f"hf://{each}" for each in repos]
    outs = [folder / part.facts["stage"]["folder"] for part in plans]
    running, card = _streaming(running, urls), options.get("base_model")
    folders = _sent(
        Planned(checkpoint, _judged(plans, outs, checkpoint, running, card, together=False)),
        urls, options,
    ).folders  # fmt: skip
    sizes = ",".join(map(str, partition))
    variables = [VARIABLE[known]] if known else list(VARIABLE.values())
    planned = PlannedStages(
        checkpoint, folders, together=False, out=folder, whole=whole, partition=partition,
        environment=tuple(f"{variable}={sizes}" for variable in variables),
        notes=() if unchecked is None else (unchecked,), unbalanced=before, balanced=after,
    )  # fmt: skip
    if options.get("for_run"):
        planned.check_out()
    return planned


def run(
    recipe: Steps,
    source: str | Path | Checkpoint,
    out: str | Path,
    *,
    dry_run: bool = False,
    profile: bool = False,
    events: Events | Callback | None = None,
    **options: Unpack[PlanOptions],
) -> Result:
    """Run a recipe on a source and write the folder `out`; options as for `plan`. With `dry_run` nothing
    is written, and whatever the run would refuse is refused. `profile` measures where the time goes
    (`profiled` does so for several calls).

    `events` receives the progress: an object with the methods of Events, or a function of the bytes
    written and the bytes to write in total.

        >>> told = []
        >>> made = api.run(
        ...     "copy", sample, folder / "copy", jobs=1, events=lambda done, total: told.append(done)
        ... )
        >>> made.folder.name, made.tensors, told[-1]
        ('copy', 233, 7059360)
        >>> api.run("copy", sample, folder / "copy").already_done
        True
        >>> api.run("copy", sample, folder / "bf16")  # the other example's
        Traceback (most recent call last):
        qconvert.core.errors.OutputError: ...

    Raises as `plan` does, OutputError (foreign or locked folder, other plan, full disk), RunError (data
    that cannot be right). Nothing is published unless all of it is.
    """
    from qconvert.run.profile import profiled

    if profile:
        with profiled() as profiling:
            made = run(recipe, source, out, dry_run=dry_run, events=events, **options)
            return replace(made, profile=profiling.profile())
    options["for_run"] = not dry_run
    planned = plan(recipe, source, out, **options)
    if not dry_run:
        return carry_out(planned, events=events)[0]
    (look,) = looks = planned.foreseen()
    check_foreseen(looks)
    (folder,) = planned.folders
    return Result(
        look.out, folder.fingerprint, folder.tensors, folder.ready.layout.nbytes, (),
        folder.warnings, (), look.state == "finished" and not look.damaged, look.done,
        dict.fromkeys(look.damaged, "damaged"), dry_run=True, url=look.url,
    )  # fmt: skip


def converter(recipe: Steps, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Converter:
    """Plan a recipe for tensors in memory, of torch (any device) or numpy, by their names in the
    checkpoint, and the model's `config` (what config.json holds). Only their types are looked at: the
    result converts these and later values of them, as often as they change, without another plan.

    For the weight sync of reinforcement learning: a trainer's BF16 weights, after each step, as the
    runtime that samples holds them.

        >>> from safetensors.torch import load_file
        >>> import json
        >>> bf16 = load_file(next((folder / "bf16").glob("*.safetensors")))
        >>> config = json.loads((folder / "bf16" / "config.json").read_text())
        >>> sync = api.converter(api.passes()["fp8"](), bf16, config)
        >>> sync.config["quantization_config"]["quant_method"]
        'fp8'
        >>> for step in range(2):  # each with new values
        ...     sent = sum(tensor.nbytes for name, tensor in sync.stream(bf16))
        >>> sent < sum(tensor.nbytes for tensor in bf16.values())
        True

    Raises as `plan` does, DataError for what is no tensor; PlanError for a recipe that calibrates, and
    for numpy where a dtype is BF16 or FP8, which it does not have.
    """
    from qconvert.checkpoint.in_memory import checkpoint_of
    from qconvert.run.in_memory import Converter, is_torch, type_of

    steps = _recipe(recipe)
    if any(getattr(step, "calibrate", None) is not None for step in steps.passes):
        raise PlanError(
            "a calibration runs the model layer by layer and needs its folder; in memory choose "
            "rounding to nearest, or convert the folder"
        )
    types = {name: type_of(name, tensor) for name, tensor in tensors.items()}
    planned = plan(steps, checkpoint_of(types, config))
    (folder,) = planned.folders
    return Converter(folder.ready.plan, all(map(is_torch, tensors.values())))


def convert(recipe: Steps, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """A model's tensors converted in memory, all at once: `converter` once, for one use.

        >>> from safetensors.torch import load_file
        >>> import json
        >>> bf16 = load_file(next((folder / "bf16").glob("*.safetensors")))
        >>> config = json.loads((folder / "bf16" / "config.json").read_text())
        >>> made = api.convert("qwen3.5-moe-nvfp4", bf16, config)
        >>> len(made) > len(bf16)  # its scales
        True

    Raises as `converter` and Converter.stream do."""
    return dict(converter(recipe, tensors, config).stream(tensors))


@contextmanager
def headers_of(where: str) -> Iterator[Place]:
    """Within this, `folder` of what it gives can be opened, planned and advised on: headers and small
    files of a repo on the Hub (ORG/NAME, fetched by ranges, no weights) or in a store; of a folder it is
    that one.

        >>> with api.headers_of(str(sample)) as place:
        ...     print(api.open_checkpoint(place.folder).family.name, place.fetched)
        qwen3_5 False

    Raises CheckpointError for a repo that is not there, RunError where the Hub fails for too long."""
    from qconvert.hub.headers import place_of

    with place_of(where) as place:
        yield place


def clean(
    out: str | Path, *, work_dir: str | Path | None = None, dry_run: bool = False
) -> tuple[str, ...]:
    """Drop the unfinished work of an interrupted run in a folder, or in the stages in it; a finished
    result is not touched. Of a repo on the Hub (`hf://ORG/NAME`) the branches with shards of unfinished
    results are removed, and the folder below `work_dir` that they were made in. Returns a line for
    each that was removed, or with `dry_run` would be. Raises OutputError if another run holds it, and
    for no folder; RunError where the Hub fails.

        >>> api.clean(folder / "bf16")  # another example's result, which is finished
        ()
    """
    from qconvert.run.dry_run import unfinished
    from qconvert.run.workspace import clean as _clean

    if is_hub(out):
        return _clean_repo(str(out), work_dir, dry_run=dry_run)
    if work_dir is not None:
        raise UsageError("a work folder is for an OUT on the Hub, hf://ORG/NAME")
    if not Path(out).is_dir():
        raise OutputError(f"{out}: no such folder")
    if dry_run:
        return tuple(f"unfinished work in {found}" for found in unfinished(Path(out)))
    return (f"unfinished work in {out}",) if _clean(Path(out), Files()) else ()


def _clean_repo(where: str, work_dir: str | Path | None, *, dry_run: bool) -> tuple[str, ...]:
    """Remove what runs to a repo left, there and here."""
    from qconvert.hub.clean import leftovers_of, remove_branches
    from qconvert.run.workspace import clean as _clean

    found = leftovers_of(where, work_dir)
    if not dry_run:
        if found.folder is not None:  # refused while a run is at work there
            _clean(found.folder, Files())
        remove_branches(found)
    here = () if found.folder is None else (f"unfinished work in {found.folder}",)
    return *here, *(f"branch {name} of {found.repo}" for name in found.branches)


def render(report: Report, form: str) -> str:
    """A validation's report as `text`, `json`, `junit`, `sarif`, `markdown`, `github` or `html`.

        >>> print(api.render(api.validate(sample), "text").splitlines()[-1])
        0 errors, 0 warnings

    Raises UsageError for another form."""
    from qconvert.validation.reports import render as _render

    return _render(report, form)


def recipes() -> dict[str, str]:
    """The built-in recipes, by name, as YAML."""
    from qconvert.recipe.recipe import builtin_recipes

    return builtin_recipes()


def passes() -> dict[str, type[Pass]]:
    """Every pass by its name in a recipe, a frozen dataclass whose fields are its options.

    >>> api.passes()["w4a16"](group_size=32).group_size
    32
    """
    from qconvert.passes import passes as _passes

    return _passes()


def formats() -> Mapping[str, Format]:
    """Every format of a weight that is read or written, by name, those of other packages first: its
    tensors, what of it may be cut, whose bytes it equals, how it is read, made and stated in a config.

    >>> api.formats()["mxfp4"].parameters
    ('weight_packed', 'weight_scale')
    """
    from qconvert.formats.registry import formats as _formats

    return _formats()


def rules() -> Mapping[str, Rule]:
    """Return what each id of a finding means: title, cause and fix, by id.

    >>> api.rules()["QC015"].title
    'a grid of block scales does not fit its weight'
    """
    from qconvert.validation.runner import rules as _rules

    return _rules()


def carry_out(planned: Planned, *, events: Events | Callback | None = None) -> tuple[Result, ...]:
    """Run a plan. Returns one result per folder; none of folders that were not begun when the time was
    over. Raises as `run` does."""
    if isinstance(planned, PlannedStages):
        planned.check_out()
    told = _told(events)
    results: list[Result] = []
    for part in planned.parts:
        results += _carried_out(part, told)
        if results[-1].left_units:
            break
    return tuple(results)


def check_foreseen(looks: Iterable[Outlook]) -> None:
    """Raise OutputError if a run would refuse to start in any of the folders."""
    refusals = [text for look in looks for text in look.refusals]
    if refusals:
        raise OutputError("; ".join(dict.fromkeys(refusals)))


def status(out: str | Path) -> tuple[FolderStatus, ...]:
    """Return who did what in a folder that shards fill, or in each stage of a split. Raises OutputError
    where qconvert has made nothing.

        >>> [found.state for found in api.status(api.run("copy", sample, folder / "all").folder)]
        ['finished']
    """
    from qconvert.run.status import status_of

    return status_of(Path(out))


def validate(
    folder: str | Path,
    against: str | Path | None = None,
    *,
    level: Level = "headers",
    pair: str | Path | None = None,
    draft: str | Path | None = None,
    beside: str | Path | None = None,
    kernels: bool = False,
    layers: tuple[int, ...] | None = None,
    runtime: str | None = None,
    tp: int = 1,
    pp: int | str | None = None,
    ep: int = 1,
    jobs: int | None = None,
    memory: int | str | None = None,
    follow_links: bool = False,
    events: Events | Callback | None = None,
    notice: Callable[[str], None] | None = None,
) -> Report:
    """Check a converted folder, the folder of all its pipeline stages, or a repo on the Hub.

    `against` is the source that it was made from. `level` headers reads no weights, sample some of each
    kind, full every byte. `pair` is the GPU side of a folder of CPU experts, `draft` the folder of the
    draft that was grafted to the source. `beside` is another folder made from the source, which is
    checked at that level, too; its report is the report's `beside`. `kernels` compares
    qconvert's Triton kernels with torch, on the weights of `layers` (None: a few). `runtime`
    (`sglang==0.5.23`) also asks the simulator of that runtime's loader what `tp` tensor-parallel ranks
    would do with the folder, in each of `pp` stages (a number, or the layers of each: `15,16`), with
    `ep` groups of experts among them. `jobs`
    worker processes (None: the cores, as far as the work needs them) start by importing the main
    module: a script needs `if __name__ == "__main__"`. `memory` of all processes: None is no limit.
    From a repo on the Hub level headers fetches no weights, the others what they read; `notice` is
    called with what was fetched of headers.

    The report's `findings` are errors and warnings; `proved`, `read` and `not_checked` say what was
    checked, and how. Raises CheckpointError for a folder that does not exist and for a source or GPU
    side that cannot be read, UsageError for options that exclude one another.

        >>> report = api.validate(sample)
        >>> report.errors, report.about["model"]
        (0, 'qwen3_5_moe_text (family qwen3_5): 4 layers, 4 experts, 1 MTP layer')
    """
    from qconvert.hub.headers import about_repo, place_of
    from qconvert.validation.runner import Request, validate_folder
    from qconvert.validators.headers.stage_set import validate_set

    if draft is not None and against is None:
        raise UsageError("--draft was grafted to a source: give --against SRC")
    if beside is not None:
        if against is None:
            raise UsageError("--beside compares two folders of one source: give --against SRC")
        other = validate(
            beside, against, level=level, jobs=jobs, memory=memory, follow_links=follow_links,
            events=events, notice=notice,
        )  # fmt: skip
        this = validate(
            folder, against, level=level, pair=pair, draft=draft, kernels=kernels,
            layers=layers, runtime=runtime, tp=tp, pp=pp, ep=ep, jobs=jobs,
            memory=memory, follow_links=follow_links, events=events, notice=notice,
        )  # fmt: skip
        return replace(this, beside=other)
    serving = _serving(runtime, tp, pp, ep)
    request = Request(level, layers, kernels, jobs, _size(memory), serving)
    source = None if against is None else str(against)
    partner = None if pair is None else str(pair)
    weights = level != "headers" or kernels
    with place_of(str(folder), weights=weights) as place:
        if notice is not None and place.fetched:
            notice(place.summary)
        here = Path(place.folder)
        if not stage_folders(here):
            report = validate_folder(
                here, source, request=request, pair=partner,
                draft=None if draft is None else str(draft), progress=_told(events),
                follow_links=follow_links,
            )  # fmt: skip
        elif partner is not None:
            raise UsageError("--pair goes with a folder of experts, not with stages")
        elif draft is not None:
            raise UsageError(
                "--draft goes with one folder, not with stages: check the result of join"
            )
        else:
            report = validate_set(
                here, source, request=request, progress=_told(events), follow_links=follow_links
            )
        return about_repo(report, place)


def _serving(runtime: str | None, tp: int, pp: int | str | None, ep: int) -> Serving | None:
    from qconvert.runtimes.consumers import parse_consumer
    from qconvert.runtimes.pipeline import parse_partition
    from qconvert.runtimes.serving import Serving

    if runtime is None and (tp, pp, ep) != (1, None, 1):
        raise UsageError("--tp, --pp and --ep are sizes of a runtime: give --for NAME")
    stages = (1,) if pp is None else parse_partition(str(pp))
    return None if runtime is None else Serving(parse_consumer(runtime), tp, stages, ep)


def advise(
    source: str | Path | Checkpoint,
    runtime: str,
    machine: Machine | None = None,
    *,
    disaggregated: bool = False,
    numa: int = 2,
    hotness: str | None = None,
    follow_links: bool = False,
) -> Advice:
    """Return which conversion a model needs for a runtime (`sglang`, `ktransformers`, optionally with
    `==VERSION`), if any: the first of several, in the order of what they lose, that the runtime's loader
    takes whole and the machine holds. From headers alone; the loader is simulated.

        >>> found = api.advise(sample, "sglang", api.Machine(gpus=1))
        >>> found.best.candidate.command, found.tp  # no command: it is served as it is
        ('', 1)

    `disaggregated` asks for a launch line for each role; `numa` nodes and a `hotness` map are for
    KTransformers. Raises CheckpointError, UsageError for a runtime that is not simulated.
    """
    from qconvert.advise.advice import advise as _advise
    from qconvert.advise.options import Machine
    from qconvert.runtimes.consumers import Consumer, parse_consumer

    consumer = Consumer("ktransformers") if runtime == "ktransformers" else parse_consumer(runtime)
    checkpoint = _checkpoint(source, follow_links=follow_links)
    return _advise(
        checkpoint, consumer, machine or Machine(), disaggregated=disaggregated, numa=numa,
        hotness=hotness,
    )  # fmt: skip


def evaluate(
    folder: str | Path | Checkpoint,
    against: str | Path | Checkpoint,
    data: str | Path | None,
    *,
    samples: int = 64,
    length: int = 2048,
    seed: int = 0,
    column: str | None = None,
    pair: str | Path | Checkpoint | None = None,
    layers: int | None = None,
    memory: int | str | None = None,
    devices: Sequence[str] = (),
    write: bool = False,
    follow_links: bool = False,
    events: Events | Callback | None = None,
    notice: Callable[[str], None] | None = None,
) -> Evaluation:
    """Return what a conversion cost in quality: the folder's model and its source run on the same
    tokens, a decoder layer of each in memory at a time, as transformers computes them in BF16.

    `data` is what a calibration takes (text, JSONL, tokenized safetensors, hf-dataset:NAME), of which
    the first `samples` of at most `length` tokens are used, or those that a `seed` draws; `column` is
    where the text is. None: random tokens, for `layers` alone. `pair` is the GPU side of a folder of CPU
    experts (None: the source). `layers`: only so many, and no logits. `memory` is what this process may
    take (bytes, or `48GiB`; None: three quarters of the machine), `devices` are torch's names, the first
    of which runs all but experts (none: all GPUs, else the CPU). `write` notes the result in the
    folder's manifest and on its card. `events` count samples that went through a layer of a model;
    `notice` is told what a user must know of the data.

        >>> ids = folder / "ids.jsonl"
        >>> _ = ids.write_text('{"input_ids": [3, 1, 4, 1, 5]}')
        >>> found = api.evaluate(folder / "bf16", sample, ids, layers=1, devices=["cpu"])
        >>> found.samples, found.layers, found.hidden, found.logits
        (1, 1, (0.0,), None)

    Raises UsageError for options that do not fit, CheckpointError for models that cannot be compared,
    PlanError for those that cannot be run, DataError for the data, RunError for too little memory or
    disk, OutputError where `write` cannot."""
    from qconvert.evaluate.record import check_recordable, record
    from qconvert.evaluate.run import evaluate as _evaluate
    from qconvert.repair.write import finish
    from qconvert.samples.data import DataSpec

    if write and layers is not None:
        raise UsageError("an evaluation of some layers alone is not written: omit layers, or write")
    if data is None and layers is None:
        raise UsageError(
            "random tokens have no perplexity: give data, or run the first layers alone"
        )
    name = None if data is None else str(data)
    spec = DataSpec(name, samples, length, seed, data is None, column)
    if write:
        finish(folder.root if isinstance(folder, Checkpoint) else Path(folder), notice)
    repo = _checkpoint(folder, follow_links=follow_links)
    if write:
        if any(shard.remote is not None for shard in repo.shards):
            where = "on the Hub" if repo.name.startswith("hf://") else "in a store"
            raise UsageError(f"{repo.name}: is {where}, which is not written to; omit --write")
        check_recordable(repo)
    beside = None if pair is None else _checkpoint(pair, follow_links=follow_links)
    found = _evaluate(
        repo, _checkpoint(against, follow_links=follow_links), spec, pair=beside, layers=layers,
        memory=_size(memory), devices=tuple(devices), events=_told(events), notice=notice,
    )  # fmt: skip
    if write:
        record(repo, found)
    return found


def repair(
    folder: str | Path,
    out: str | Path | None = None,
    *,
    runtime: str | None = None,
    tp: int = 1,
    dry_run: bool = False,
    follow_links: bool = False,
    notice: Callable[[str], None] | None = None,
) -> tuple[Repair, ...]:
    """Make config.json, index, ignore lists, hf_quant_config.json, model card, manifest and receipt of a
    folder true to its tensors, or of the folder of all pipeline stages, or of a repo on the Hub (its
    headers are fetched, and `notice` is called with what was). Weights are never written.

    Changed files are written into the folder, or into `out`, which a repo needs; with `dry_run` nowhere.
    The result must have no error left; with a `runtime` (`sglang==0.5.23`) the simulator of its loader
    must say that `tp` ranks load it whole. Returns what was (or would be) changed, per folder; again on
    the result it is nothing.

        >>> [found.changes for found in api.repair(sample)]
        [()]

    Raises CheckpointError for what only a new conversion can mend (not with `dry_run`: see
    Repair.left), for an unfinished conversion and for shards that cannot be read.
    """
    from qconvert.hub.headers import place_of
    from qconvert.repair.repair import repair_of
    from qconvert.repair.write import finish, write
    from qconvert.runtimes.consumers import parse_consumer
    from qconvert.runtimes.serving import Serving
    from qconvert.validation.runner import Request, validate_folder

    serving = None if runtime is None else Serving(parse_consumer(runtime), tp)

    def judge(part: Path, follow_links: bool) -> list[Finding]:
        request = Request(serving=serving)
        report = validate_folder(part, request=request, follow_links=follow_links)
        if notice is not None and report.not_known:
            notice(f"not checked: {report.not_known}")
        return report.findings

    with place_of(str(folder)) as place:
        if notice is not None and place.fetched:
            notice(place.summary)
        here = Path(place.folder)
        if place.fetched and out is None and not dry_run:
            raise UsageError("a repo is not written to: name a folder for the changed files")
        parts = stage_folders(here) or [here]
        if not dry_run and out is None:
            for part in parts:
                finish(part, notice)
        found = tuple(repair_of(part, judge, follow_links=follow_links) for part in parts)
        if dry_run:
            return found
        for one in found:
            one.check()
        for one in found:
            into = one.folder if out is None else Path(out) / one.folder.relative_to(here)
            if one.changes:
                into.mkdir(parents=True, exist_ok=True)
                write(into, one.changes)
        return found


def diff(
    a: str | Path | Checkpoint,
    b: str | Path | Checkpoint,
    *,
    data: bool = True,
    follow_links: bool = False,
) -> list[Difference]:
    """The differences between two checkpoints, tensor by tensor, whatever their shards; without `data`
    only names, dtypes and shapes are compared. Raises CheckpointError."""
    from qconvert.validation.diff import compare

    first, second = (_checkpoint(where, follow_links=follow_links) for where in (a, b))
    return compare(first, second, data=data)


def diff_files(a: str | Path, b: str | Path, *, follow_links: bool = False) -> FilesCompared:
    """Compare a folder with a repo on the Hub (`hf://ORG/NAME`, `@REVISION`), or two repos, file by
    file, by the sizes and hashes that the Hub lists: not a byte of weights is fetched, and hidden
    files are left out. Raises UsageError for two folders, CheckpointError, OutputError, RunError."""
    from qconvert.hub.file_diff import compare_files

    return compare_files(a, b, follow_links=follow_links)


class _Counted:
    """Events that call a function."""

    def __init__(self, tell: Callback) -> None:
        self._tell, self._total, self._done = tell, 0, 0

    def start(self, total: int, done: int) -> None:
        self._total, self._done = total, done

    def wrote(self, nbytes: int) -> None:
        self._done += nbytes
        self._tell(self._done, self._total)

    def phase(self, text: str) -> None:
        pass


def _told(events: Events | Callback | None) -> Events | None:
    return _Counted(events) if callable(events) else events


def _recipe(steps: Steps) -> Recipe:
    from qconvert.recipe.recipe import load_recipe

    if isinstance(steps, Recipe):
        return steps
    if isinstance(steps, str | Path):
        return load_recipe(str(steps))
    return Recipe("steps", tuple(steps) if isinstance(steps, tuple | list) else (steps,))


def _checkpoint(source: str | Path | Checkpoint, *, follow_links: bool) -> Checkpoint:
    if isinstance(source, Checkpoint):
        return source
    return open_source(source, follow_links=follow_links)


def _grafted(
    source: str | Path | Checkpoint, draft: str | Path | Checkpoint, options: PlanOptions
) -> Grafted:
    from qconvert.checkpoint.grafted import grafted

    return grafted(_source(source, options), _source(draft, options))


def _placed(
    out: str | Path | None, source: Checkpoint, options: PlanOptions
) -> tuple[Path | None, str | None]:
    """The folder that a result is made in, and the URL that it is sent to. Raises OutputError for one on
    top of the source, UsageError for what cannot be done in a store."""
    if out is not None and is_hub(out):
        from qconvert.hub.destination import check_streamed, hub_destination, hub_work_folder

        repo = hub_destination(str(out))
        check_streamed(repo, options.get("shard"), options.get("engine", "local"))
        work = hub_work_folder(repo, options.get("work_dir"))
        if options.get("for_run"):
            check_apart(work, source)
        return work, f"hf://{repo}"
    if out is None or not is_url(out):
        folder = None if out is None else _here(out, options)
        if folder is not None and options.get("for_run"):
            check_apart(folder, source)
        return folder, None
    url = store_of(str(out)).url
    if options.get("shard") is not None and options.get("work_dir") is None:
        raise UsageError(
            f"--shard: name a folder that all machines share by --work-dir, to make {url}"
        )
    from qconvert.run.delivery import check_urls_apart

    check_urls_apart(url, source)
    folder = work_folder(url, options.get("work_dir"))
    if options.get("for_run"):
        check_apart(folder, source)
    return folder, url


def _placed_together(
    outs: Sequence[str | Path], source: Checkpoint, options: PlanOptions
) -> tuple[list[Path], list[str | None]]:
    """The folders that results of one run are made in, and the URLs of repos that they go to. Raises
    UsageError where some are repos and others are not, or two are one."""
    if not any(map(is_hub, outs)):
        return [_here(out, options) for out in outs], [None for _ in outs]
    if not all(map(is_hub, outs)):
        raise UsageError(
            f"{outs[0]} and {outs[1]}: one is a folder and one a repo on the Hub; name two of a kind"
        )
    placed = [_placed(out, source, options) for out in outs]
    urls = [url for _, url in placed]
    if len(set(urls)) < len(urls):
        raise UsageError(f"{urls[0]}: is named for both sides; name another repo for one of them")
    return [folder for folder, _ in placed if folder is not None], urls


def _here(out: str | Path, options: PlanOptions) -> Path:
    """A folder of this machine. Raises UsageError for a URL."""
    if is_url(out) or is_hub(out):
        raise UsageError(f"{out}: several folders are made at once; name folders of this machine")
    if options.get("work_dir") is not None:
        raise UsageError(
            f"--work-dir is for an OUT in a store, and {out} is a folder of this machine"
        )
    return Path(out)


def _sent(planned: Planned, urls: Sequence[str | None], options: PlanOptions) -> Planned:
    """A plan whose folders are sent elsewhere, one to each URL. Raises UsageError for --private where
    none is a repo's."""
    private = options.get("private", False)
    if private and not any(url is not None and is_hub(url) for url in urls):
        raise UsageError("--private is of a repo that is made on the Hub: name one, hf://ORG/NAME")
    return replace(
        planned,
        folders=tuple(
            replace(folder, url=url, private=private)
            for folder, url in zip(planned.folders, urls, strict=True)
        ),
    )


def _streaming(running: Options, urls: Sequence[str | None]) -> Options:
    """The options of a run whose results go to the Hub while they are made."""
    streamed = any(url is not None and is_hub(url) for url in urls)
    return replace(running, streamed=True) if streamed else running


def _size(given: int | str | None) -> int | None:
    return None if given is None else parse_size(given)


def _source(source: str | Path | Checkpoint, options: PlanOptions) -> Checkpoint:
    return _checkpoint(source, follow_links=options.get("follow_links", False))


def _running(recipe: Recipe, options: PlanOptions) -> Options:
    shard = _size(options.get("max_shard_size")) or recipe.max_shard_size or DEFAULT_SHARD_BYTES
    return Options(
        _size(options.get("memory")), options.get("jobs"), shard, options.get("sha256", False),
        verify=options.get("verify", False), shard=_shard(options),
        finish=options.get("finish", False), command=tuple(options.get("command", ())),
        engine=_engine(options), address=options.get("address"),
        until=Until.of(options.get("until")), disk_budget=_size(options.get("disk_budget")),
    )  # fmt: skip


def _engine(options: PlanOptions) -> EngineName:
    engine = options.get("engine", "local")
    check_engine(engine, options.get("address"), options.get("shard"))
    return engine


def _shard(options: PlanOptions) -> Shard | None:
    from qconvert.run.division import parse_shard

    text = options.get("shard")
    return None if text is None else parse_shard(text, os.environ)


def _judged(
    plans: Sequence[Plan],
    outs: Sequence[Path | None],
    source: Checkpoint,
    options: Options,
    base_model: str | None,
    *,
    together: bool = True,
) -> tuple[PlannedFolder, ...]:
    """Plans with their model cards, ready to run, and the verdict of the header rules on each folder.
    Every conversion goes through here. `together`: from one read. Raises PlanError for a folder that
    would fail validation."""
    carded = [with_card(plan, base_model) for plan in plans]
    groups = [carded] if together else [[plan] for plan in carded]
    ready = [part for group in groups for part in prepare_together(group, options)]
    if not any(one.options.streamed for one in ready):
        _check_disk(ready)
    verdicts = judgement.judged(ready, source)
    return tuple(PlannedFolder(*each) for each in zip(outs, ready, verdicts, strict=True))


def _check_disk(ready: Sequence[Prepared]) -> None:
    """Raise PlanError where the folders of a command take more disk than it may. A calibration's states
    are those of one folder at a time."""
    states = max(map(_states_of, ready), default=0)
    folders = "the result" if len(ready) == 1 else f"the result, {len(ready)} folders,"
    check_disk_budget(ready[0].options.disk_budget, whole_result(ready, states), folders)


def _states_of(ready: Prepared) -> int:
    """Bytes that a plan's calibration keeps in the work folder, 0 where nothing is calibrated."""
    if ready.plan.calibration is None:
        return 0
    from qconvert.calibrate.backend import work_dir_bytes

    return work_dir_bytes(ready.plan.calibration)


def _backend(parts: Sequence[tuple[Prepared, Path]]) -> Backend | None:
    """Return what calibrates for plans that are run together; None, without its imports, where nothing
    does."""
    plans = [ready.plan for ready, _ in parts]
    if all(plan.calibration is None for plan in plans):
        return None
    from qconvert.calibrate.backend import backend_for

    return backend_for(plans)


def _named(planned: Planned) -> list[tuple[Prepared, Path]]:
    """Plans with their folders. Raises UsageError if a folder was not named."""
    found = [(part.ready, part.out) for part in planned.folders if part.out is not None]
    if len(found) < len(planned.folders):
        raise UsageError("the plan has no output folder; name one in `plan`")
    return found


def _foreseen(planned: Planned) -> list[Outlook]:
    from qconvert.run.dry_run import foreseen

    if any(folder.out is None for folder in planned.folders):
        return []
    parts = _named(planned)
    backend = _backend(parts)
    looks = foreseen(parts, backend=backend)
    return [
        _foreseen_there(folder, look) for folder, look in zip(planned.folders, looks, strict=True)
    ]


def _foreseen_there(folder: PlannedFolder, look: Outlook) -> Outlook:
    """Return what a run finds of a result that goes to a store."""
    place = folder.delivery or folder.outlet
    if place is None:
        return look
    look = replace(look, url=folder.url)
    try:
        found = place.look()
    except QConvertError as error:
        return replace(look, state=None, refusals=(*look.refusals, str(error)))
    return replace(look, state="finished", done=look.units) if found == "finished" else look


def _carried_out(planned: Planned, events: Events | None) -> list[Result]:
    parts = _named(planned)
    backend = _backend(parts)
    first = planned.folders[0]
    outlets = [folder.outlet for folder in planned.folders if folder.outlet is not None]
    if outlets:
        return _streamed_out(planned, parts, outlets, events, backend)
    if first.delivery is None:
        receipts = run_together(parts, events=events, backend=backend, judge=judgement.judge_staged)
        return [_result(*each) for each in zip(planned.folders, receipts, strict=True)]
    (_, folder), delivery = parts[0], first.delivery
    if delivery.look() == "finished":
        delivery.clear(folder, Files())
        there = RunResult(
            folder, first.fingerprint, tuple(delivery.names), first.ready.layout.nbytes,
            already_done=True,
        )  # fmt: skip
        return [_result(first, there)]
    (done,) = run_together(parts, events=events, backend=backend, judge=judgement.judge_staged)
    if not done.published:  # a shard: whoever publishes sends
        return [_result(first, done)]
    delivery.send(folder, events or Silent())
    delivery.clear(folder, Files())
    # What was made before and only sent now is no result that was there already.
    return [_result(first, replace(done, already_done=False))]


def _streamed_out(
    planned: Planned,
    parts: Sequence[tuple[Prepared, Path]],
    outlets: Sequence[HubOutlet],
    events: Events | None,
    backend: Backend | None,
) -> list[Result]:
    """Run a plan whose folders all go to the Hub while they are made."""
    from qconvert.run.workspace import clean as _clean

    if all(outlet.look() == "finished" for outlet in outlets):
        for outlet, (_, work) in zip(outlets, parts, strict=True):
            outlet.tidy()  # of a run that was killed at its very end
            _clean(work, Files())
        return [
            _result(
                folder,
                RunResult(
                    work, ready.fingerprint, tuple(publish_order(ready)), ready.layout.nbytes,
                    already_done=True,
                ),
            )
            for folder, (ready, work) in zip(planned.folders, parts, strict=True)
        ]  # fmt: skip
    done = run_together(
        parts, events=events, backend=backend, outlets=outlets, judge=judgement.judge_staged
    )
    return [_result(*each) for each in zip(planned.folders, done, strict=True)]


def _result(planned: PlannedFolder, done: RunResult) -> Result:
    return Result(
        done.out, done.fingerprint, planned.tensors, done.nbytes, done.files,
        planned.warnings, done.remarks, done.already_done, done.resumed_units,
        done.repaired, published=done.published, url=planned.url, left_units=done.left_units,
        left_bytes=done.left_bytes,
    )  # fmt: skip
