"""GPTQ in this process: the backend that solves a plan's calibrated units, and packs their codes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qconvert.calibrate import llmcompressor_backend
from qconvert.calibrate.devices import check_devices, each_once, found_devices, kind_of
from qconvert.calibrate.distributed import Launched, launched
from qconvert.calibrate.expert_stats import begin, check_claim
from qconvert.calibrate.gpu_workers import CalibrationArgs, WorkerPool, calibrate_with, early
from qconvert.calibrate.library import load_shared
from qconvert.calibrate.memory import least_bytes, least_linear_bytes
from qconvert.calibrate.packing import Packed, Packers
from qconvert.calibrate.progress import Clock, Work, added, has_begun, layer_work, sizes_of
from qconvert.calibrate.settings import ExpertSchemes, LayerDone, LayerStats, Matrix, Settings
from qconvert.checkpoint.checkpoint import WORK_DIR, Checkpoint
from qconvert.core.errors import DataError, PlanError
from qconvert.core.extras import lacking, require
from qconvert.core.graph import nodes
from qconvert.core.int_scheme import CodePacker, IntScheme, Scheme
from qconvert.formats.base import Stored
from qconvert.formats.registry import read_matrix
from qconvert.models.calibrated import Calibrated, calibrated_op
from qconvert.models.skip_reasons import check_experts, check_runs
from qconvert.plan.plan import Calibrating, Plan
from qconvert.run.folder.workspace import check_apart, check_folders_apart
from qconvert.run.work.backend import (
    BackendJob,
    Barrier,
    CalibratedUnit,
    Item,
    PausedAt,
    Phase,
    Remark,
    Requirements,
    SolvedUnit,
)
from qconvert.run.work.events import Events
from qconvert.run.work.files import Files
from qconvert.samples.data import load_tokens, most_tokens
from qconvert.samples.request import Calibration, digest_of, fact

if TYPE_CHECKING:
    from qconvert.calibrate.engine import Event
    from qconvert.samples.data import Ids

_NEEDS = "calibration runs the model's own class"
_times: list[int] = []  # a calibration on several hosts each: they meet anew


def save_statistics(
    checkpoint: Checkpoint, request: Calibration, memory: int | None, events: Events,
    notice: Callable[[str], None],
) -> None:  # fmt: skip
    """Run a model over a calibration's samples as it is, and write what its routed experts see to the
    folder `save_stats`. One that was interrupted goes on at its layer. `events` count layers. Raises as
    `GptqBackend.check` and `engine.calibrate` do, PlanError for a model without routed experts."""
    plan = Plan.identity(checkpoint)
    check_experts(plan, "there is nothing to count")
    check_runs(plan)
    backend = GptqBackend(Calibrating(plan, request), {}, watches=True)
    backend.check(())
    assert request.save_stats is not None
    folder, files = Path(request.save_stats), Files()
    work_dir = folder / WORK_DIR
    job = BackendJob((), memory, work_dir, digest_of(request, checkpoint.root), files)
    events.start(len(plan.role_index.dims.groups.get("moe", ())), 0)
    with closing(backend.solve(job)) as items:
        for item in items:
            match item:
                case Barrier():
                    events.wrote(1)
                case Phase():
                    events.phase(item.text)
                case Remark():
                    notice(item.text)
    shutil.rmtree(work_dir, ignore_errors=True)


def backend_for(plans: Sequence[Plan]) -> GptqBackend | None:
    """The backend of plans that are run together, None where nothing is to be calibrated. Raises
    PlanError where plans ask for different calibrations."""
    asked = [plan.calibration for plan in plans if plan.calibration is not None]
    if not asked:
        return None
    first = asked[0]
    for other in asked[1:]:
        if other.request != first.request:
            raise PlanError(
                "folders written by one run share one calibration: give all of them the same one"
            )
    # Of all there are: an interrupted run may want no matrix of some kind any more.
    found = [calibrated_op(node) for plan in plans for node in nodes(plan.tensors.values())]
    ops = [op for op in found if op is not None]
    packers = {(op.layer, op.kind): op.packers for op in ops if op.expert is not None}
    linears = {op.kind: op.packers for op in ops if op.expert is None and not op.of_cache}
    caches = {op.layer: op for op in ops if op.of_cache}
    return GptqBackend(first, packers, linears, caches)


@dataclass(frozen=True)
class GptqBackend:
    """A `run.backend.Backend`; `packers` are by layer those of each kind of an expert's matrices
    (gate_proj, up_proj, down_proj), `linears` those of each module beside the experts, `caches` ask for
    scales of a KV cache, by layer.
    `watches`: nothing is solved, and all layers are run for statistics."""

    calibration: Calibrating
    packers: Mapping[tuple[int, str], tuple[CodePacker, ...]]
    linears: Mapping[str, tuple[CodePacker, ...]] = field(default_factory=dict)
    caches: Mapping[int, Calibrated] = field(default_factory=dict)
    watches: bool = False

    @cached_property
    def _data(self) -> tuple[list[Ids], list[str]]:
        """The samples, and what a user must know of them: read once, by `check` if it is called."""
        request, remarks = self.calibration.request, list[str]()
        if request.kind in ("text", "jsonl", "dataset"):  # the others need no tokenizer
            silence_transformers()
        return load_tokens(request, self.calibration.model.checkpoint.root, remarks.append), remarks

    def needs(self) -> Requirements:
        dims, memory = self.calibration.model.role_index.dims, 0
        # What there is where no device was named, only torch knows: too slow to import for this.
        if self.packers and "cpu" in self.calibration.request.devices:
            schemes = max(map(len, self.packers.values()))
            solver = self.calibration.request.solver
            memory = least_bytes(
                dims.hidden_size, dims.moe_intermediate_size, schemes, solver,
                corrects=Settings.of(self.calibration.request).corrects,
            )  # fmt: skip
        if self.linears and "cpu" in self.calibration.request.devices:
            solver = self.calibration.request.solver
            shapes = {
                (one.rows, one.columns, len(self.linears[module]))
                for module, one in self._stored.items()
            }
            memory = max(memory, *(least_linear_bytes(*shape, solver) for shape in shapes))
        return Requirements(memory, work_dir_bytes(self.calibration))

    def check(self, folders: Sequence[Path]) -> None:
        request, checkpoint = self.calibration.request, self.calibration.model.checkpoint
        if not (self.packers or self.linears or self.caches or self.watches):
            return  # a pipeline stage without what is solved
        require("calibrate", _NEEDS)
        if request.save_stats is not None and not self.follows:
            stats = Path(request.save_stats)
            check_apart(stats, checkpoint)
            for folder in folders:
                check_folders_apart(stats, folder)
            check_claim(stats, self._about())
        self._check_devices()
        if self.linears or self.caches:
            self._check_linears()
        _ = self._data

    def _check_devices(self) -> None:
        names, pool = self.calibration.request.devices, early()
        if pool is None or kind_of(names) == "cpu":
            check_devices(names)
        else:  # they have imported torch meanwhile
            pool.machine.check(names)
        each_once(names)

    @cached_property
    def _stored(self) -> dict[str, Stored]:
        """Return how the checkpoint has each linear."""
        source = Plan.identity(self.calibration.model.checkpoint)
        return {module: read_matrix(source, module)[0] for module in self.linears}

    def _check_linears(self) -> None:
        """Refuse a model whose class cannot be run, or has no linear for a module: what descriptions of
        classes do not say of dense models."""
        from qconvert.calibrate.linears import linears_of
        from qconvert.calibrate.model import Model

        silence_transformers()
        source = Plan.identity(self.calibration.model.checkpoint)
        linears_of(source, Model(source, Settings().attention), dict.fromkeys(self.linears, ()))

    def unused(self) -> Sequence[str]:
        folder = self.calibration.request.save_stats
        if folder is None:
            return []
        return [f"no layer was left to calibrate, so this run wrote no statistics to {folder}"]

    def work(self, job: BackendJob) -> tuple[Work, Work]:
        first = min(unit.op.layer for unit in job.units) if has_begun(job.work_dir) else 0
        last = max(unit.op.layer for unit in job.units)
        return added(self._works[first : last + 1]), added(self._works[:first])

    @cached_property
    def _works(self) -> list[Work]:
        """Return what each layer takes."""
        request = self.calibration.request
        source = Plan.identity(self.calibration.model.checkpoint)
        places = source.role_index.places.items()
        layers = {name.rpartition(".")[0]: place.layer for name, place in places}
        shapes: dict[int, tuple[tuple[int, int], ...]] = {}
        for module, one in self._stored.items():
            layer = layers.get(module)
            if layer is not None:
                shapes[layer] = (*shapes.get(layer, ()), (one.rows, one.columns))
        targets = max(map(len, [*self.packers.values(), *self.linears.values()]), default=0)
        tokens = sum(sample.size for sample in self._data[0])
        return [
            layer_work(sizes, tokens, targets, Settings.of(request))
            for sizes in sizes_of(source, shapes)
        ]

    @cached_property
    def _launched(self) -> Launched | None:
        """This process among those of several hosts, None where it calibrates alone."""
        return launched(os.environ) if self.calibration.request.distributed else None

    @property
    def follows(self) -> bool:
        return self._launched is not None and not self._launched.leads

    @contextmanager
    def at_work(self) -> Iterator[None]:
        if self._launched is None:
            yield
            return
        try:
            yield
            if not self.follows and self._ranks.are_there:  # they were not asked for anything
                for _ in self._ranks.calibrate(None, self._packing, Clock(), ()):
                    pass
        finally:
            if "_ranks" in self.__dict__:
                self._ranks.end()

    @cached_property
    def _ranks(self) -> WorkerPool:
        """Processes of this host, among those of several, which wait for the others."""
        assert self._launched is not None
        names = each_once(self.calibration.request.devices) or found_devices()
        _times.append(1)
        return WorkerPool(self._launched.devices(names), self._launched, len(_times))

    def get_ready(self, job: BackendJob) -> None:
        if self._launched is not None:
            _ = self._ranks
        elif early() is None:
            _ = self._loading

    @cached_property
    def _loading(self) -> Future[Sequence[str]]:
        """Loads in the background: up to 7 s of imports, while workers write what is not solved."""
        threads = ThreadPoolExecutor(1, "load what calibrates")
        made = threads.submit(self._load)
        threads.shutdown(wait=False)
        return made

    def _load(self) -> Sequence[str]:
        """Import what solving needs, where this process solves. Returns the devices."""
        request = self.calibration.request
        devices = each_once(request.devices) or found_devices()
        if _in_processes(devices):
            return devices
        if llmcompressor_backend.are_asked(request.solver, devices[0]):
            silence_llm_compressor()
            llmcompressor_backend.load()  # before what this process takes is counted
        load_shared()
        silence_transformers()
        return devices

    def _pool(self) -> WorkerPool | None:
        """Processes that solve, None where this one does."""
        if self._launched is not None:
            return self._ranks
        names, begun = each_once(self.calibration.request.devices), early()
        if begun is None:
            names = tuple(self._loading.result())
        elif not names:
            names = begun.machine.devices
        if begun is not None and begun.devices == names:
            return begun
        if begun is not None:
            begun.end()
        if _in_processes(names):
            return WorkerPool(names)
        self._loading.result()
        return None

    @property
    def _packing(self) -> Packers:
        caches = {op.kind: op.packers for op in self.caches.values()}
        return Packers(self.packers, {**self.linears, **caches})

    def solve(self, job: BackendJob) -> Generator[Item]:
        pool = self._pool()
        try:
            yield from self._solved(job, pool)
        finally:
            if pool is not None:
                pool.end()

    def _solved(self, job: BackendJob, pool: WorkerPool | None) -> Generator[Item]:
        request, model = self.calibration.request, self.calibration.model
        devices = ("cpu",) if pool is None else pool.devices
        from qconvert.run.work.memory import free_bytes

        here = 1 if self._launched is None else self._launched.local_count
        yield Phase("reading calibration data")
        samples, remarks = self._data
        for remark in remarks:
            yield Phase(remark)
            yield Remark(remark)
        if not self.follows:
            self._begin_stats(job.files)  # claimed before hours of work
        given = CalibrationArgs(
            checkpoint=model.checkpoint,
            tokens=samples,
            schemes=_targets(self.packers, model),
            settings=Settings.of(request),
            work_dir=job.work_dir,
            memory=(job.memory or free_bytes() // 2 // here) // len(devices),
            key=f"{job.key} {kind_of(devices)}",
            last=None if self.watches else max(unit.op.layer for unit in job.units),
            linears={
                module: [
                    _integers(module, packer.scheme_of(self._stored[module].columns))
                    for packer in packers
                ]
                for module, packers in self.linears.items()
            },
            caches={layer: op.kind for layer, op in self.caches.items()},
            statistics=request.save_stats is not None,
            until=job.until,
        )
        clock, works = Clock(job.on_work), self._works
        packers = self._packing
        events: Generator[Event | Packed]
        if pool is not None:
            events = pool.calibrate(given, packers, clock, works)
        else:
            events = calibrate_with(given, "cpu", files=job.files, clock=clock, works=works)
        units, paused = _by_place(job), False
        with closing(events):
            for event in events:
                match event:
                    case Matrix() | Packed():
                        # Of its layer, an interrupted run may have written some.
                        unit = units.get((event.layer, event.expert, event.kind))
                        if unit is not None:
                            yield _solved(unit, event, packers)
                    case LayerDone():
                        if event.stats is not None:
                            self._save_stats(event.layer, event.stats, job.files)
                        yield Barrier()
                    case Phase() | Remark():
                        yield event
                    case PausedAt():
                        paused = True
                        yield event
                del event  # its codes must not live on while the next ones are computed
        if not self.follows and not paused:  # a map of hot experts is of all layers
            yield from map(Remark, self._hotness(job.files))

    def _begin_stats(self, files: Files) -> None:
        request = self.calibration.request
        if request.save_stats is not None:
            begin(Path(request.save_stats), self._about(), files)

    def _save_stats(self, layer: int, stats: LayerStats, files: Files) -> None:
        from qconvert.calibrate.expert_stats import save_layer

        request = self.calibration.request
        if request.save_stats is not None:
            save_layer(Path(request.save_stats), layer, stats, files)

    def _about(self) -> dict[str, Any]:
        """Return what tells these statistics from those of another model, data or format: layers see
        what the formats before them answer."""
        request, checkpoint = self.calibration.request, self.calibration.model.checkpoint
        return {
            "model_type": checkpoint.config.get("model_type"),
            "source": checkpoint.header_digest,
            "source_sample": checkpoint.sample_digest,
            "packers": _by_packers(
                {f"layer {layer} {kind}": some for (layer, kind), some in self.packers.items()}
            ),
            **({"linears": _by_packers(self.linears)} if self.linears else {}),
            **fact(request, digest_of(request, checkpoint.root)),
        }

    def _hotness(self, files: Files) -> Iterator[str]:
        """Write the map of hot experts next to the statistics; a remark says how to serve with it."""
        from qconvert.calibrate.expert_stats import OPTIONS, save_hotness

        request, dims = self.calibration.request, self.calibration.model.role_index.dims
        if request.save_stats is None:
            return
        try:
            file = save_hotness(
                Path(request.save_stats), dims.num_layers, dims.groups["moe"], files
            )
        except DataError as error:  # an earlier run's layers are in another folder
            yield f"no map of hot experts was written: {error}"
        else:
            yield f"wrote {file.name} beside them, the map of hot experts: {OPTIONS} {file.name}"


def _in_processes(devices: Sequence[str]) -> bool:
    """Return whether devices have a process each: all but one CPU, which is this process's."""
    return len(devices) > 1 or kind_of(devices) != "cpu"


def _by_place(job: BackendJob) -> dict[tuple[int, int | None, str], CalibratedUnit]:
    """Units by layer, expert and kind."""
    return {(unit.op.layer, unit.op.expert, unit.op.kind): unit for unit in job.units}


def unmet(plan: Plan) -> tuple[str, ...]:
    """Return what a plan's calibration lacks on this machine, for who reads the plan; `check` refuses
    it."""
    missing = "" if plan.calibration is None else lacking("calibrate")
    return (f"{_NEEDS}, and {missing}",) if missing else ()


def work_dir_bytes(calibration: Calibrating) -> int:
    """Bytes that a calibration keeps in the work folder at the most: states of every token."""
    from qconvert.calibrate.engine import disk_bytes

    request, dims = calibration.request, calibration.model.role_index.dims
    twice = calibration.linears and bool(dims.num_experts)
    corrects = Settings.of(request).corrects
    tokens = most_tokens(request)
    return disk_bytes(tokens, dims.hidden_size, linears=twice, corrects=corrects)


def _by_packers(matrices: Mapping[str, tuple[CodePacker, ...]]) -> dict[str, list[str]]:
    """Names of matrices by their packers."""
    found: dict[str, list[str]] = {}
    for name, packers in matrices.items():
        found.setdefault(repr(packers), []).append(name)
    return found


def _solved(unit: CalibratedUnit, found: Matrix | Packed, packers: Packers) -> SolvedUnit:
    """A matrix as the results of its unit."""
    packed = found if isinstance(found, Packed) else packers.pack(found)
    return SolvedUnit(unit.number, packed.buffers(), packed.sources)


def silence_llm_compressor() -> None:
    """Import llm-compressor without its own remarks: these would stand between lines of a progress bar,
    and in JSON on stdout. Whoever uses it in this process later finds it whole, and silent."""
    from loguru import logger

    # Its import sets its logger up anew, and warns of a machine without a GPU before it is done.
    silent = "LLM_COMPRESSOR_LOG_DISABLED"
    before = os.environ.get(silent)
    os.environ[silent] = "true" if before is None else before
    try:
        import llmcompressor  # noqa: F401  (it logs, and sets its logger up, when it is imported)
    finally:
        if before is None:
            del os.environ[silent]
    for library in ("compressed_tensors", "llmcompressor"):
        logger.disable(library)
    try:
        logger.level("METRIC")
    except ValueError:  # a level that its modifiers log at, and a disabled one does not make
        logger.level("METRIC", no=38)


def silence_transformers() -> None:
    """Let transformers show neither remarks nor progress bars of its own."""
    from transformers.utils import logging

    hf: Any = logging
    hf.set_verbosity_error()
    hf.disable_progress_bar()


def _integers(module: str, scheme: Scheme) -> IntScheme:
    """Return how a linear beside the experts is quantized."""
    if not isinstance(scheme, IntScheme):
        raise PlanError(
            f"{module}: calibration finds NVFP4 codes of routed experts alone: ignore it"
        )
    return scheme


def _targets(
    packers: Mapping[tuple[int, str], tuple[CodePacker, ...]], model: Plan
) -> dict[int, list[ExpertSchemes]]:
    """Schemes to solve for by layer, in the order of the packers, which a layer's experts share."""
    dims = model.role_index.dims
    hidden, middle = dims.hidden_size, dims.moe_intermediate_size
    return {
        layer: [
            ExpertSchemes(gate.scheme_of(hidden), down.scheme_of(middle))
            for gate, down in zip(
                packers[layer, "gate_proj"], packers[layer, "down_proj"], strict=True
            )
        ]
        for layer in dict.fromkeys(layer for layer, _ in packers)
    }
