"""Questions about results and sources: validated, advised on, evaluated, repaired, signed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.open import stage_folders
from qconvert.core.errors import OutputError, UsageError
from qconvert.core.options import from_keywords, taking
from qconvert.core.shown import count, parse_size
from qconvert.run.work.events import Callback, Counted, Events, NoEvents
from qconvert.service.reading import checkpoint_of
from qconvert.validation.options import ValidateKeywords, ValidateOptions

if TYPE_CHECKING:
    from qconvert.advise.advice import Advice
    from qconvert.advise.options import Machine
    from qconvert.evaluate.ask import Asked
    from qconvert.evaluate.result import Evaluation
    from qconvert.fit.fitting import Fitting
    from qconvert.hub.signing import Signed, Verified
    from qconvert.repair.repair import Repair
    from qconvert.samples.request import Calibration
    from qconvert.validation.findings import Finding
    from qconvert.validation.runner import Level, Report


_ALL = 2**31  # questions


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
                adapters=asked.adapter, progress=events, follow_links=asked.follow_links,
            )  # fmt: skip
        elif asked.pair is not None:
            raise UsageError("--pair goes with a folder of experts, not with stages")
        elif asked.draft is not None or asked.adapter:
            word = "--draft" if asked.draft is not None else "--adapter"
            raise UsageError(
                f"{word} goes with one folder, not with stages: check the result of join"
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
    data: str | None = None,
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
    KTransformers; `data` is named where a command calibrates. Raises CheckpointError, UsageError for a
    runtime that is not simulated, LoaderError for a loader that cannot be asked.
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
        hotness=hotness, data=data, loader=own,
    )  # fmt: skip


def fitting(
    source: str | Path | Checkpoint,
    data: str | Path | None,
    runtime: str = "vllm",
    *,
    formats: Sequence[str] = (),
    rtn: bool = False,
    tp: int = 1,
    samples: int = 16,
    length: int = 512,
    seed: int = 0,
    column: str | None = None,
    capability: tuple[int, int] = (9, 0),
    memory: int | str | None = None,
    devices: Sequence[str] = (),
    loader: str | Path | None = None,
    work_dir: str | Path | None = None,
    follow_links: bool = False,
    notice: Callable[[str], None] | None = None,
) -> Fitting:
    """A model whose formats can be chosen under budgets, each group of modules that a runtime loads as
    one by itself. The first choice measures what each of `formats` (none: all that the runtime loads on
    `tp` ranks) costs each group, in KL divergence of the output over samples of `data` (None: random
    token ids), a decoder layer in memory at a time, and keeps that below `work_dir` (None: the user's
    cache); further ones take no measurement. With data the steps of a choice then find INT4 codes, and
    NVFP4 codes of routed experts, by a calibration with the same samples, unless `rtn`: all are rounded.

        >>> ready = api.fitting(sample, None, samples=1, length=8, formats=["fp8", "w4a16-g32"],
        ...     devices=["cpu"], work_dir=folder / "measured")
        >>> found = ready.fit(api.Budget(bits=6))
        >>> found.bits <= 6, found.solution.gap
        (True, 0.0)
        >>> api.run(api.Recipe("fit", found.steps), sample, folder / "fitted", jobs=1).folder.name
        'fitted'

    Raises UsageError for a runtime whose loader is not simulated, and for an unknown format;
    CheckpointError, LoaderError. What its methods raise is said there."""
    from qconvert.advise.options import Machine
    from qconvert.core.own_process import cache_root
    from qconvert.fit import NAMES
    from qconvert.fit.fitting import Fitting, runtime_of
    from qconvert.runtimes.consumers import parse_consumer
    from qconvert.runtimes.loader.ask import loader_of
    from qconvert.samples.request import DataSpec

    consumer = runtime_of(parse_consumer(runtime))
    for name in formats:
        if name not in NAMES:
            raise UsageError(f"format {name!r}: expected one of {', '.join(NAMES)}")
    spec = DataSpec(
        None if data is None else str(data), samples, length, seed, data is None, column
    )
    return Fitting(
        checkpoint_of(source, follow_links=follow_links), consumer, spec, tuple(formats) or NAMES, tp,
        Machine(gpus=max(1, tp), capability=capability),
        cache_root() / "fit" if work_dir is None else Path(work_dir),
        None if memory is None else parse_size(memory), tuple(devices),
        None if loader is None else loader_of(loader, consumer), notice,
        calibrates=data is not None and not rtn,
    )  # fmt: skip


def evaluate(
    folder: str | Path | Checkpoint,
    against: str | Path | Checkpoint,
    data: str | Path | None,
    *,
    samples: int | None = None,
    length: int = 2048,
    seed: int = 0,
    column: str | None = None,
    task: bool = False,
    activations: bool = False,
    beside: Sequence[str | Path | Checkpoint] = (),
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
    the first `samples` (None: 64) of at most `length` tokens are used, or those that a `seed`
    draws; `column` is where the text is. None: random tokens, for `layers` alone. `task`: the data
    are questions (qconvert/evaluate/task.py), all of which are asked where `samples` is None.
    `activations`: those of the folders are rounded as their configs have runtimes do. `beside` are
    other folders made from the source, compared with the first in the same run: each has an
    evaluation in `beside` of the result, with its `differences`. `pair` is the GPU side of folders
    of CPU experts (None: the source). `layers`: only so many, and no logits. `memory` is what this
    process may take (bytes, or `48GiB`; None: three quarters of the machine), `devices` are torch's
    names, the first of which runs all but experts (none: all GPUs, else the CPU). `write` notes the
    result in each folder's manifest and on its card. `events` count samples that went through a
    layer of a model; `notice` is told what a user must know of the data.

        >>> ids = folder / "ids.jsonl"
        >>> _ = ids.write_text('{"input_ids": [3, 1, 4, 1, 5]}')
        >>> found = api.evaluate(folder / "bf16", sample, ids, layers=1, devices=["cpu"])
        >>> found.samples, found.layers, found.hidden, found.logits
        (1, 1, (0.0,), None)

    Raises UsageError for options that do not fit, CheckpointError for models that cannot be compared,
    PlanError for those that cannot be run, DataError for the data, RunError for too little memory or
    disk, OutputError where `write` cannot."""
    from qconvert.evaluate.engine import evaluate as _evaluate
    from qconvert.evaluate.result import check_recordable, record
    from qconvert.repair.write import finish
    from qconvert.samples.request import DataSpec

    if write and layers is not None:
        raise UsageError("an evaluation of some layers alone is not written: omit layers, or write")
    if data is None and layers is None:
        raise UsageError(
            "random tokens have no perplexity: give data, or run the first layers alone"
        )
    name = None if data is None else str(data)
    if task and (data is None or layers is not None or column is not None):
        raise UsageError(
            "questions are answered by whole models, out of a file of JSONL: omit layers"
        )
    several = samples or (_ALL if task else 64)
    spec = DataSpec(name, several, length, seed, data is None, column)
    repos = []
    for one in (folder, *beside):
        if write:
            finish(one.root if isinstance(one, Checkpoint) else Path(one), notice)
        repo = checkpoint_of(one, follow_links=follow_links)
        if write:
            if any(shard.remote is not None for shard in repo.shards):
                where = "on the Hub" if repo.name.startswith("hf://") else "in a store"
                raise UsageError(f"{repo.name}: is {where}, which is not written to; omit --write")
            check_recordable(repo)
        repos.append(repo)
    found = _evaluate(
        repos, checkpoint_of(against, follow_links=follow_links), spec,
        pair=None if pair is None else checkpoint_of(pair, follow_links=follow_links), task=task,
        activations=activations, layers=layers,
        memory=None if memory is None else parse_size(memory), devices=tuple(devices),
        events=Counted.of(events), notice=notice,
    )  # fmt: skip
    if write:
        for repo, noted in zip(repos, (found, *found.beside), strict=True):
            record(repo, noted)
    return found


def ask(
    folder: str | Path | Checkpoint,
    server: str,
    data: str | Path | None = None,
    *,
    samples: int = 8,
    length: int = 256,
    seed: int = 0,
    column: str | None = None,
    pair: str | Path | Checkpoint | None = None,
    memory: int | str | None = None,
    devices: Sequence[str] = (),
    follow_links: bool = False,
    events: Events | Callback | None = None,
    notice: Callable[[str], None] | None = None,
) -> Asked:
    """Ask a running server of vLLM or sglang, at `http://HOST:PORT`, for the log-probabilities of a few
    texts' tokens and of 16 that it adds to each, and compare them with those of the folder's own weights
    on the same ids, as `evaluate` computes them.

    `data` has other texts, of which `samples` of at most `length` tokens are taken as there; the other
    options are those of `evaluate`. The server's key, if it wants one, is in QCONVERT_SERVER_KEY.

    Raises RunError where no such server answers, CheckpointError where it serves another model, and as
    `evaluate` does."""
    from qconvert.evaluate.ask import ask_server
    from qconvert.samples.request import DataSpec

    spec = None if data is None else DataSpec(str(data), samples, length, seed, False, column)
    return ask_server(
        checkpoint_of(folder, follow_links=follow_links), server, spec,
        pair=None if pair is None else checkpoint_of(pair, follow_links=follow_links),
        memory=None if memory is None else parse_size(memory), devices=tuple(devices),
        events=Counted.of(events), notice=notice,
    )  # fmt: skip


def expert_statistics(
    source: str | Path | Checkpoint,
    calibration: Calibration,
    *,
    memory: int | str | None = None,
    follow_links: bool = False,
    events: Events | Callback | None = None,
    notice: Callable[[str], None] | None = None,
) -> None:
    """Run a model as it is over a calibration's samples, a decoder layer in memory at a time, and write
    to its folder `save_stats` what routed experts see: how many tokens each is given, REAP's saliency,
    moments of activations, a map of hot experts. Nothing is quantized.

    `memory` is what this process may take (bytes, or `48GiB`; None: half of what is free). `events`
    count layers; `notice` is told what a user must know. The same call goes on where one was
    interrupted.

    Raises PlanError for a model without routed experts and one that cannot be run, DataError for the
    data, OutputError for the folder, RunError for too little memory or disk."""
    from qconvert.calibrate.backend import save_statistics

    save_statistics(
        checkpoint_of(source, follow_links=follow_links), calibration,
        None if memory is None else parse_size(memory), Counted.of(events) or NoEvents(),
        notice or (lambda _: None),
    )  # fmt: skip


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


def sign(
    folder: str | Path,
    key: str | Path,
    *,
    signature: str | Path | None = None,
    checksums: str | Path | None = None,
    sbom: str | Path | None = None,
    level: Level = "full",
    events: Events | Callback | None = None,
) -> Signed:
    """Validate a folder, and sign its files as OpenSSF model signing does, with a private key in PEM
    (P-256, P-384 or P-521; the password of one that is encrypted is in QCONVERT_KEY_PASSWORD).

    `signature` is the file to write (None: model.sig in the folder), `checksums` one that sglang's
    --model-checksum names, `sbom` one for a bill of materials (CycloneDX 1.6), `level` what is validated
    before. A change of the folder, and of its card, makes the signature wrong: sign what `upload` has
    written its card into.

    Raises OutputError for a folder that fails validation, is unfinished or has links, CheckpointError
    for a file that is no such key, PlanError where cryptography is missing.
    """
    from qconvert.hub.signing import sign_folder

    told = Counted.of(events) or NoEvents()
    report = validate(folder, level=level)
    errors = [finding for finding in report.findings if finding.severity == "error"]
    if errors:
        first = errors[0]
        raise OutputError(
            f"{folder}: fails validation ({count(len(errors), 'error')}), so it is not signed: "
            f"{first.rule}: {first.where}: {first.message}; mend it, or convert again"
        )
    return sign_folder(
        Path(folder), Path(key), None if signature is None else Path(signature),
        checksums=None if checksums is None else Path(checksums),
        sbom=None if sbom is None else Path(sbom),
        started=lambda total: told.start(total, 0), wrote=told.wrote,
    )  # fmt: skip


def verify(
    folder: str | Path,
    key: str | Path,
    *,
    signature: str | Path | None = None,
    follow_links: bool = False,
    events: Events | Callback | None = None,
) -> Verified:
    """Compare a folder's files with its signature, made by `sign` or by model-signing with a key, by the
    signer's public key in PEM. `signature` is the file (None: model.sig in the folder).

    Raises CheckpointError for a signature that is not one of this key and for a file that is no key,
    OutputError for an unfinished folder, PlanError where cryptography is missing.
    """
    from qconvert.hub.signing import verify_folder

    told = Counted.of(events) or NoEvents()
    return verify_folder(
        Path(folder), Path(key), None if signature is None else Path(signature),
        follow_links=follow_links, started=lambda total: told.start(total, 0), wrote=told.wrote,
    )  # fmt: skip
