"""Conversions planned, judged, run, and done in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import PlanError, UsageError
from qconvert.core.options import from_keywords, taking
from qconvert.hub.readme import with_card
from qconvert.plan.plan import Pass, Plan, run_passes
from qconvert.recipe.recipe import Recipe
from qconvert.run.folder.prepare import Prepared, check_disk_budget, prepare_together, whole_result
from qconvert.run.folder.workspace import check_apart, check_folders_apart
from qconvert.run.work.events import Callback, Events
from qconvert.run.work.options import PlanOptions, RunOptions
from qconvert.service.output import Output, folder_or_repo, output_at, outputs_at
from qconvert.service.planned import (
    Planned,
    PlannedFolder,
    PlannedStages,
    Result,
    carry_out,
    check_dry_run,
)
from qconvert.service.reading import checkpoint_of, opened
from qconvert.validation import judgement

if TYPE_CHECKING:
    from qconvert.passes.amx import ExpertsToAmx
    from qconvert.passes.w4a16 import ExpertsToW4A16
    from qconvert.run.delta import WrittenDelta
    from qconvert.run.in_memory import Converter

# A recipe, one or several passes, a recipe file, or the name of a built-in recipe.
Steps = Recipe | Pass | tuple[Pass, ...] | list[Pass] | str | Path
# A source by its name, or opened.
From = str | Path | Checkpoint


@taking(RunOptions, PlanOptions.__annotations__)
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
    asked, steps = from_keywords(RunOptions, options), recipe_of(recipe)
    checkpoint = opened(source, asked)
    output = output_at(out, checkpoint, asked)
    made = run_passes(Plan.identity(checkpoint), steps.passes)
    return _with_verdicts([made], [output], made.checkpoint, _sized(asked, steps))


def plan_after(
    recipe: Steps, source: str | Path | Checkpoint, name: str, *, follow_links: bool = False
) -> Plan:
    """The plan after a pass of the recipe, before the first (`source`), or at the `end`, where it has
    been checked. For inspection: it cannot be carried out. Raises UsageError for a pass that is not in
    the recipe, and as `plan` does."""
    steps = recipe_of(recipe)
    names = [step.name for step in steps.passes]
    if name not in ("source", *names, "end"):
        known = ", ".join(("source", *names, "end"))
        raise UsageError(f"--dump-after {name}: the recipe has no such pass; choose one of {known}")
    start = Plan.identity(checkpoint_of(source, follow_links=follow_links))
    if name == "end":
        return run_passes(start, steps.passes)
    for step in () if name == "source" else steps.passes[: names.index(name) + 1]:
        start = step(start)
    return start


@taking(RunOptions, PlanOptions.__annotations__)
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
    the model with packed INT4 experts for its GPU side (None: as that pass does by default). Both
    may be repos on the Hub; the card of each then names the other."""
    from qconvert.hub.destination import naming_other
    from qconvert.passes.pair import pair_plans
    from qconvert.passes.w4a16 import ExpertsToW4A16

    asked = from_keywords(RunOptions, options)
    checkpoint = opened(source, asked)
    outputs = outputs_at((cpu_out, gpu_out), checkpoint, asked)
    first, second = outputs
    if asked.for_run and first.folder is not None and second.folder is not None:
        check_folders_apart(second.folder, first.folder)
    plans = pair_plans(Plan.identity(checkpoint), cpu, gpu or ExpertsToW4A16())
    if first.url is not None and second.url is not None:  # the card of each names the other
        plans = naming_other(plans[0], second.url), naming_other(plans[1], first.url)
    return _with_verdicts(plans, outputs, checkpoint, asked)


@taking(RunOptions, PlanOptions.__annotations__)
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
    from qconvert.checkpoint.open import grafted
    from qconvert.passes.drafts import GraftDraft

    return _planned_with(
        grafted, GraftDraft(), source, draft, out, from_keywords(RunOptions, options)
    )


@taking(RunOptions, PlanOptions.__annotations__)
def plan_patched(
    source: str | Path | Checkpoint,
    delta: str | Path | Checkpoint,
    out: str | Path | None = None,
    **options: Unpack[PlanOptions],
) -> Planned:
    """As `plan`, for the new checkpoint that a folder of `write_delta` makes of the old one, `source`.

        >>> delta = api.write_delta(sample, folder / "bf16", folder / "delta")
        >>> planned = api.plan_patched(sample, folder / "delta", folder / "patched")
        >>> patched = api.carry_out(planned)[0]
        >>> api.diff(folder / "bf16", patched.folder)
        []

    Raises as `plan` does, and CheckpointError where the folder is no delta, or is one of another
    checkpoint; its run raises where what is read is not what was compared."""
    from qconvert.checkpoint.delta import patched
    from qconvert.passes.apply_delta import ApplyDelta

    return _planned_with(
        patched, ApplyDelta(), source, delta, out, from_keywords(RunOptions, options)
    )


def _planned_with(
    together: Callable[[Checkpoint, Checkpoint], Checkpoint],
    step: Pass,
    source: From,
    other: From,
    out: str | Path | None,
    asked: RunOptions,
) -> Planned:
    """Plan a pass that reads two folders, which `together` makes one checkpoint of."""
    checkpoint = together(opened(source, asked), opened(other, asked))
    output = output_at(out, checkpoint, asked)
    made = run_passes(Plan.identity(checkpoint), (step,))
    return _with_verdicts([made], [output], checkpoint, asked)


def write_delta(
    old: str | Path | Checkpoint,
    new: str | Path | Checkpoint,
    out: str | Path,
    *,
    follow_links: bool = False,
    events: Events | Callback | None = None,
) -> WrittenDelta:
    """Write to the folder `out` what turns one checkpoint into another: the bytes of what changed, their
    places, and hashes of all tensors. `plan_patched` reads it; its example is there.

    Raises CheckpointError, OutputError where `out` is not empty."""
    from qconvert.run.delta import write_delta as written
    from qconvert.run.work.events import Counted, NoEvents

    first, second = (checkpoint_of(where, follow_links=follow_links) for where in (old, new))
    return written(first, second, Path(out), Counted.of(events) or NoEvents())


@taking(RunOptions, PlanOptions.__annotations__)
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
    from qconvert.hub.destination import hub_destination, naming_stages, stage_repo
    from qconvert.passes.stages import split_plan, weights_of
    from qconvert.runtimes.consumers import parse_consumer
    from qconvert.runtimes.pipeline import (
        VARIABLE,
        PipelineCut,
        balanced,
        check_runtime,
        partition_of,
    )

    asked, steps = from_keywords(RunOptions, options), recipe_of(recipe)
    checkpoint = opened(source, asked)
    whole_output = folder_or_repo(out, asked)
    folder, url = whole_output.folder, whole_output.url
    assert folder is not None
    if asked.for_run:
        check_apart(folder, checkpoint)
    whole = run_passes(Plan.identity(checkpoint), steps.passes)
    known = check_runtime(runtime)
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
        before, after = PipelineCut(partition, weights.held(partition)), balanced(weights)
        partition = after.partition
    plans = [part.check() for part in split_plan(whole, partition, known)]
    names = [part.facts["stage"]["folder"] for part in plans]
    outputs = [Output(folder / name) for name in names]
    if url is not None:
        repos = [stage_repo(hub_destination(url), name) for name in names]
        plans = [naming_stages(part, [each.id for each in repos]) for part in plans]
        outputs = [
            replace(output, url=f"hf://{repo}", private=asked.private)
            for output, repo in zip(outputs, repos, strict=True)
        ]
    linked = replace(_sized(asked, steps), link_near=folder if link and url is None else None)
    sizes = ",".join(map(str, partition))
    variables = [VARIABLE[known]] if known else list(VARIABLE.values())
    planned = PlannedStages(
        checkpoint, _with_verdicts(plans, outputs, checkpoint, linked, together=False).folders,
        together=False, out=folder, whole=whole, partition=partition,
        environment=tuple(f"{variable}={sizes}" for variable in variables),
        notes=() if unchecked is None else (unchecked,), unbalanced=before, balanced=after,
    )  # fmt: skip
    if asked.for_run:
        planned.check_out()
    return planned


@taking(RunOptions, PlanOptions.__annotations__)
def plan_ranks(
    recipe: Steps,
    source: str | Path | Checkpoint,
    out: str | Path,
    tp: int,
    ep: int = 1,
    **options: Unpack[PlanOptions],
) -> Planned:
    """As `plan`, with the result as one folder for each of `tp` ranks in `out`, `rank-0-of-N` and so on,
    made one after another: the parameters that vLLM's loader of sharded states copies. `ep`: 1, or `tp`
    for ranks that have whole experts."""
    from qconvert.passes.rank_state import split_ranks

    asked, steps = from_keywords(RunOptions, options), recipe_of(recipe)
    checkpoint = opened(source, asked)
    folder = Path(out)
    if asked.for_run:
        check_apart(folder, checkpoint)
    plans = split_ranks(run_passes(Plan.identity(checkpoint), steps.passes), tp, ep)
    outputs = [Output(folder / part.facts["rank"]["folder"]) for part in plans]
    sized = _sized(asked, steps)
    planned = _with_verdicts(plans, outputs, checkpoint, sized, together=False)
    if asked.for_run:
        PlannedStages(checkpoint, planned.folders, together=False, out=folder).check_out()
    return planned


@taking(RunOptions, PlanOptions.__annotations__)
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
    (look,) = looks = planned.dry_run()
    check_dry_run(looks)
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
    from qconvert.run.in_memory import Converter, checkpoint_of, is_torch, type_of

    steps = recipe_of(recipe)
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


def recipe_of(steps: Steps) -> Recipe:
    from qconvert.recipe.recipe import load_recipe

    if isinstance(steps, Recipe):
        return steps
    if isinstance(steps, str | Path):
        return load_recipe(str(steps))
    return Recipe("steps", tuple(steps) if isinstance(steps, tuple | list) else (steps,))


def _with_verdicts(
    plans: Sequence[Plan],
    outputs: Sequence[Output],
    source: Checkpoint,
    options: RunOptions,
    *,
    together: bool = True,
) -> Planned:
    """Plans with their model cards, ready to run, and the verdict of the header rules on each folder.
    Every conversion goes through here. `together`: from one read. Raises PlanError for a folder that
    would fail validation."""
    options = replace(options, streamed=any(output.streamed for output in outputs))
    carded = [with_card(plan, options.base_model) for plan in plans]
    groups = [carded] if together else [[plan] for plan in carded]
    ready = [part for group in groups for part in prepare_together(group, options)]
    if not options.streamed:
        _check_disk(ready)
    verdicts = judgement.judged(ready, source)
    folders = tuple(PlannedFolder(*each) for each in zip(outputs, ready, verdicts, strict=True))
    return Planned(source, folders, together)


def _sized(options: RunOptions, recipe: Recipe) -> RunOptions:
    """The options with the size of files that the recipe states, where they state none."""
    return replace(options, max_shard_size=options.max_shard_size or recipe.max_shard_size)


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


# --- In the words of the commands --------------------------------------------------------------------

_OWN = ("w4a16", "nvfp4", "fp8", "int8", "amx")  # formats with a command of their own


def quantize(
    source: str | Path | Checkpoint,
    out: str | Path,
    form: str,
    *,
    data: str | Path | None = None,
    events: Events | Callback | None = None,
    **options: Any,
) -> Result:
    """Quantize a model to `w4a16`, `nvfp4`, `fp8`, `int8`, `amx`, or a format that `quantize --format`
    takes, such as `mxfp8`, and write the folder `out`. With `data` codes are found by GPTQ, else they
    are rounded. Options are the fields of the pass (`group_size`, `targets`, `tp`, `dialect`), those of
    Calibration (`samples`, `length`) and those of `run` (`memory`, `jobs`).

        >>> made = api.quantize(sample, folder / "int4", "w4a16", group_size=32, jobs=1)
        >>> made.folder.name
        'int4'

    Raises UsageError for an option that none of them has, and as `run` does.
    """
    step, rest = _step(form, None if data is None else str(data), options)
    return run(step, source, out, events=events, **rest)


def _step(form: str, data: str | None, options: dict[str, Any]) -> tuple[Pass, dict[str, Any]]:
    """The pass, and what is left of the options for its run."""
    from qconvert.passes import passes
    from qconvert.samples.request import Calibration

    kind: Any = passes()[form if form in _OWN else "quantize"]
    own = {one.name for one in fields(kind)}
    made = {name: value for name, value in options.items() if name in own}
    if form not in _OWN:
        made["format"] = form
    asked = {one.name for one in fields(Calibration)} - own if data is not None else set()
    if data is not None:
        if "calibrate" not in own:
            raise UsageError(f"{form} is rounded, without data: omit data={data!r}")
        calibration = {name: value for name, value in options.items() if name in asked}
        made["calibrate"] = Calibration(data=data, **calibration)
    rest = {name: value for name, value in options.items() if name not in own | asked}
    known = {*own, *asked, *PlanOptions.__annotations__}
    for name in rest:
        if name not in known:
            raise UsageError(f"{form} has no option {name!r}; it has {', '.join(sorted(known))}")
    try:
        return kind(**made), rest
    except TypeError as error:
        raise UsageError(f"{form}: {error}") from error
