"""Questions about results and sources: validated, advised on, evaluated, repaired."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.open import stage_folders
from qconvert.core.errors import UsageError
from qconvert.core.options import from_keywords, taking
from qconvert.core.shown import parse_size
from qconvert.run.work.events import Callback, Counted, Events
from qconvert.service.reading import checkpoint_of
from qconvert.validation.options import ValidateKeywords, ValidateOptions

if TYPE_CHECKING:
    from qconvert.advise.advice import Advice
    from qconvert.advise.options import Machine
    from qconvert.evaluate.result import Evaluation
    from qconvert.repair.repair import Repair
    from qconvert.validation.findings import Finding
    from qconvert.validation.runner import Report


@taking(ValidateOptions, ValidateKeywords.__annotations__)
def validate(
    folder: str | Path,
    against: str | Path | None = None,
    *,
    events: Events | Callback | None = None,
    notice: Callable[[str], None] | None = None,
    **options: Unpack[ValidateKeywords],
) -> Report:
    """Check a converted folder, the folder of all its pipeline stages, or a repo on the Hub, against the
    source that it was made from, if one is named. The options are those of the command
    (ValidateKeywords).

    Worker processes start by importing the main module: a script needs `if __name__ == "__main__"`.
    From a repo on the Hub level headers fetches no weights, the others what they read; `notice` is
    called with what was fetched of headers. With `beside`, its report is the report's `beside`.

    The report's `findings` are errors and warnings; `proved`, `read` and `not_checked` say what was
    checked, and how. Raises CheckpointError for a folder that does not exist and for a source or GPU
    side that cannot be read, UsageError for options that exclude one another.

        >>> report = api.validate(sample)
        >>> report.errors, report.about["model"]
        (0, 'qwen3_5_moe_text (family qwen3_5): 4 layers, 4 experts, 1 MTP layer')
    """
    asked = from_keywords(
        ValidateOptions, {"against": None if against is None else str(against), **options}
    )
    if asked.beside is None:
        return _validated(folder, asked, Counted.of(events), notice)
    plain = ValidateOptions(
        asked.against, level=asked.level, jobs=asked.jobs, memory=asked.memory,
        follow_links=asked.follow_links,
    )  # fmt: skip
    other = _validated(asked.beside, plain, Counted.of(events), notice)
    return replace(_validated(folder, asked, Counted.of(events), notice), beside=other)


def _validated(
    folder: str | Path,
    asked: ValidateOptions,
    events: Events | None,
    notice: Callable[[str], None] | None,
) -> Report:
    """One folder, or the stages in it."""
    from qconvert.hub.headers import about_repo, place_of
    from qconvert.validation.runner import validate_folder
    from qconvert.validators.headers.stage_set import validate_set

    request = asked.request
    with place_of(str(folder), weights=asked.level != "headers" or asked.kernels) as place:
        if notice is not None and place.fetched:
            notice(place.summary)
        here = Path(place.folder)
        if not stage_folders(here):
            report = validate_folder(
                here, asked.against, request=request, pair=asked.pair, draft=asked.draft,
                progress=events, follow_links=asked.follow_links,
            )  # fmt: skip
        elif asked.pair is not None:
            raise UsageError("--pair goes with a folder of experts, not with stages")
        elif asked.draft is not None:
            raise UsageError(
                "--draft goes with one folder, not with stages: check the result of join"
            )
        else:
            report = validate_set(
                here, asked.against, request=request, progress=events,
                follow_links=asked.follow_links,
            )  # fmt: skip
        return about_repo(report, place)


def advise(
    source: str | Path | Checkpoint,
    runtime: str,
    machine: Machine | None = None,
    *,
    disaggregated: bool = False,
    numa: int = 2,
    hotness: str | None = None,
    loader: str | Path | None = None,
    follow_links: bool = False,
) -> Advice:
    """Return which conversion a model needs for a runtime (`sglang`, `ktransformers`, optionally with
    `==VERSION`), if any: the first of several, in the order of what they lose, that the runtime's loader
    takes whole and the machine holds. From headers alone; the loader is simulated, or asked where
    `loader` names the Python of the environment that serves.

        >>> found = api.advise(sample, "sglang", api.Machine(gpus=1))
        >>> found.best.candidate.command, found.tp  # no command: it is served as it is
        ('', 1)

    `disaggregated` asks for a launch line for each role; `numa` nodes and a `hotness` map are for
    KTransformers. Raises CheckpointError, UsageError for a runtime that is not simulated, LoaderError
    for a loader that cannot be asked.
    """
    from qconvert.advise.advice import advise as _advise
    from qconvert.advise.options import Machine
    from qconvert.runtimes.consumers import Consumer, parse_consumer
    from qconvert.runtimes.loader.ask import loader_of

    consumer = Consumer("ktransformers") if runtime == "ktransformers" else parse_consumer(runtime)
    own = None if loader is None else loader_of(loader, consumer)
    checkpoint = checkpoint_of(source, follow_links=follow_links)
    return _advise(
        checkpoint, consumer, machine or Machine(), disaggregated=disaggregated, numa=numa,
        hotness=hotness, loader=own,
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
    from qconvert.evaluate.result import check_recordable, record
    from qconvert.evaluate.run import evaluate as _evaluate
    from qconvert.repair.write import finish
    from qconvert.samples.request import DataSpec

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
    repo = checkpoint_of(folder, follow_links=follow_links)
    if write:
        if any(shard.remote is not None for shard in repo.shards):
            where = "on the Hub" if repo.name.startswith("hf://") else "in a store"
            raise UsageError(f"{repo.name}: is {where}, which is not written to; omit --write")
        check_recordable(repo)
    beside = None if pair is None else checkpoint_of(pair, follow_links=follow_links)
    found = _evaluate(
        repo, checkpoint_of(against, follow_links=follow_links), spec, pair=beside, layers=layers,
        memory=None if memory is None else parse_size(memory), devices=tuple(devices),
        events=Counted.of(events), notice=notice,
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
    loader: str | Path | None = None,
    dry_run: bool = False,
    follow_links: bool = False,
    notice: Callable[[str], None] | None = None,
) -> tuple[Repair, ...]:
    """Make config.json, index, ignore lists, hf_quant_config.json, model card, manifest and receipt of a
    folder true to its tensors, or of the folder of all pipeline stages, or of a repo on the Hub (its
    headers are fetched, and `notice` is called with what was). Weights are never written.

    Changed files are written into the folder, or into `out`, which a repo needs; with `dry_run` nowhere.
    The result must have no error left; with a `runtime` (`sglang==0.5.23`) the simulator of its loader
    must say that `tp` ranks load it whole, or, with a `loader`, the Python of the environment that
    serves, the runtime itself (see `ValidateKeywords`). Returns what was (or would be) changed, per
    folder; again on the result it is nothing.

        >>> [found.changes for found in api.repair(sample)]
        [()]

    Raises CheckpointError for what only a new conversion can mend (not with `dry_run`: see
    Repair.left), for an unfinished conversion and for shards that cannot be read; LoaderError for a
    loader that cannot be asked.
    """
    from qconvert.hub.headers import place_of
    from qconvert.repair.repair import repair_of
    from qconvert.repair.write import finish, write
    from qconvert.validation.runner import validate_folder

    asked = ValidateOptions(
        runtime=runtime, tp=None if runtime is None else tp,
        loader=None if loader is None else str(loader),
    )  # fmt: skip
    request = asked.request

    def judge(part: Path, follow_links: bool) -> list[Finding]:
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
