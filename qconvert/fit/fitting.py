"""From a model and a budget to the formats of all its groups: measured once, kept, and chosen anew for
every budget."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from qconvert import __version__
from qconvert.advise.options import (
    FOR_WEIGHTS,
    Candidate,
    Choice,
    Machine,
    considered,
    considered_plan,
    few_experts,
)
from qconvert.calibrate.backend import backend_for, silence_transformers
from qconvert.calibrate.devices import check_devices, count_gpus, found_devices
from qconvert.calibrate.progress import sizes_of
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import OutputError, PlanError, RunError, UsageError
from qconvert.core.extras import require
from qconvert.core.family import text_config
from qconvert.core.json_text import parse_object
from qconvert.core.links import read_regular
from qconvert.core.shown import exact_size, format_size
from qconvert.evaluate.side import READING, Side, TextModel
from qconvert.fit import NAMES
from qconvert.fit.groups import (
    FORMS,
    STAY,
    Allowed,
    Choices,
    Encoded,
    Group,
    Model,
    Solved,
    allowed_forms,
    by_form,
    choices_of,
    encoded_in,
    model_of,
    solved_steps,
    steps_of,
)
from qconvert.fit.measure import (
    STATE,
    Measured,
    forwards,
    hidden_rows,
    measure,
    mixture_kl,
    weights_read,
)
from qconvert.fit.solve import Solution, solve
from qconvert.models.skip_reasons import check_runs
from qconvert.passes.mixture import Fitted
from qconvert.plan.plan import Pass, Plan, run_passes
from qconvert.run.executor import execute
from qconvert.run.folder.leases import take_lock
from qconvert.run.work.events import Events, NoEvents
from qconvert.run.work.files import Files, write_whole
from qconvert.run.work.options import RunOptions
from qconvert.runtimes.consumers import Consumer
from qconvert.runtimes.loader.ask import RuntimeLoader
from qconvert.runtimes.serving import SIMULATED, launch
from qconvert.samples.data import digest, load_tokens, most_tokens
from qconvert.samples.request import Calibration, DataSpec, digest_of

_FORM = 4  # goes up when the same model and data are to be measured anew
_MEASURED, _MIXTURES, _LOCK = "measured.json", "mixtures.json", "lock"
# Of a GPU's memory for weights and KV cache together: vLLM takes 0.9 by default
# (`--gpu-memory-utilization`) and keeps what a step needs out of it, sglang 0.8 to 0.9.
FOR_SERVING = 0.85
# Samples of a calibration for one of the measurement: codes take more than errors do.
_SAMPLES = 8
# Seconds of a core to read a weight, encode and decode it, and copy it to float32: 1.9e-8 at the sizes
# of Qwen3-235B on 2 cores of an EPYC, less where a GPU has the float32.
_READ = 1.6e-8
_ATTEMPTS = (
    12  # to meet a budget of files or ranks, of which a choice says only nearly how large they are
)


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of all weights' files; or `bits` a weight of all matrices that can be quantized; or GPUs of
    so much memory, on which `context` tokens of a KV cache fit beside the weights (None: a quarter of
    the memory is left). Raises UsageError unless it is one of these."""

    nbytes: int | None = None
    bits: float | None = None
    gpus: int | None = None
    gpu_memory: int | None = None
    context: int | None = None

    def __post_init__(self) -> None:
        if sum(one is not None for one in (self.nbytes, self.bits, self.gpus)) != 1:
            raise UsageError(
                "give one budget: --bytes SIZE, --bits N, or --gpus N --gpu-memory SIZE"
            )
        if self.gpus is not None and self.gpu_memory is None:
            raise UsageError("--gpus needs --gpu-memory: how much each has, such as 80GB")
        if self.gpus is None and (self.gpu_memory is not None or self.context is not None):
            raise UsageError("--gpu-memory and --context are of a budget of GPUs: add --gpus N")
        if self.bits is not None and not 1 <= self.bits <= 16:
            raise UsageError(f"--bits: expected a number from 1 to 16, found {self.bits}")

    def __str__(self) -> str:
        if self.bits is not None:
            return f"{self.bits:g} bits a weight"
        if self.nbytes is not None:
            return exact_size(self.nbytes)
        assert self.gpus is not None
        assert self.gpu_memory is not None
        cache = "" if self.context is None else f", {self.context:,} tokens of KV cache"
        return f"{self.gpus} x {format_size(self.gpu_memory)}{cache}"


@dataclass(frozen=True)
class Uniform:
    """All groups that allow it in one format, the others as they are: bits a weight, KL predicted."""

    form: str
    bits: float
    kl: float


@dataclass(frozen=True)
class Fit:
    """The best choice under a budget. `solution` numbers the formats of `choices`; `nbytes` are
    those of the weights' files; `predicted` follows from the groups' KL in nats a token, `measured`
    is that of all of them together, by a second run, both of codes rounded to nearest. `rank_bytes` and
    `cache_bytes` are those of the fullest rank at `tp` (0: not asked for or not known), `found` what was
    measured. `steps` write it, in which a calibration finds the codes of the groups `solved`, by format.
    The rest is as it was asked and found."""

    model: Model
    allowed: Allowed
    choices: Choices
    costs: tuple[Mapping[str, float], ...]
    errors: tuple[Mapping[str, float], ...]
    solution: Solution
    budget: Budget
    consumer: Consumer
    tp: int
    nbytes: int
    predicted: float
    measured: float
    tokens: int
    rank_bytes: int = 0
    cache_bytes: int = 0
    line: str = ""
    notes: tuple[str, ...] = ()
    steps: tuple[Pass, ...] = ()
    found: Measured | None = None
    solved: Mapping[str, Sequence[Group]] = field(default_factory=dict)

    @cached_property
    def chosen(self) -> dict[str, tuple[Group, ...]]:
        """Groups by format, those of FORMS first."""
        found = by_form(self.model, self.choices, self.solution.chosen)
        return {name: found[name] for name in (*NAMES, STAY) if name in found}

    @property
    def bits(self) -> float:
        return 8 * self.solution.nbytes / self.model.weights

    @property
    def uniform(self) -> list[Uniform]:
        """Each format for all groups that allow it, by bits."""
        found = []
        for name in NAMES:
            own = [name if name in forms else STAY for forms in self.choices.forms]
            if name not in own:
                continue
            sizes = [
                sizes[forms.index(form)]
                for forms, sizes, form in zip(
                    self.choices.forms, self.choices.nbytes, own, strict=True
                )
            ]
            total = sum(cost[form] for cost, form in zip(self.costs, own, strict=True))
            kl = total if self.found is None else self.found.joint(total)
            found.append(Uniform(name, 8 * sum(sizes) / self.model.weights, kl))
        return sorted(found, key=lambda one: one.bits)

    def stated(self, data: str) -> Fit:
        """The same with a step before the others that says what chose them, of samples of `data`."""
        bits, kl = float(f"{self.bits:.4g}"), float(f"{self.measured:.2g}")
        source, groups = self.model.plan.checkpoint.header_digest, len(self.model.groups)
        found = Fitted(str(self.budget), bits, kl, self.tokens, data, groups, source)
        return replace(self, steps=(found, *self.steps) if self.steps else ())

    def as_object(self) -> dict[str, Any]:
        """For JSON: bytes, KL in nats a token."""
        return {
            "budget": {name: value for name, value in asdict(self.budget).items() if value is not None},
            "runtime": self.consumer.name,
            "tp": self.tp,
            "bits": self.bits,
            "nbytes": self.nbytes,
            "quantizable_bytes": self.solution.nbytes,
            "predicted_kl": self.predicted,
            "measured_kl": self.measured,
            "gap": self.solution.gap,
            "tokens": self.tokens,
            "rank_bytes": self.rank_bytes,
            "cache_bytes": self.cache_bytes,
            "line": self.line,
            "notes": list(self.notes),
            "uniform": [asdict(one) for one in self.uniform],
            "refused": [
                {"format": form, "part": part, "why": why}
                for (form, part), why in self.allowed.refused.items()
            ],
            "groups": [
                {
                    "layer": group.layer, "part": group.part, "weights": group.weights,
                    "chosen": forms[number], "calibrated": group in self.solved.get(forms[number], ()),
                    "formats": {
                        form: {"nbytes": size, "kl": cost[form], "error": errors.get(form, 0.0)}
                        for form, size in zip(forms, sizes, strict=True)
                    },
                }
                for group, forms, sizes, number, cost, errors in zip(
                    self.model.groups, self.choices.forms, self.choices.nbytes,
                    self.solution.chosen, self.costs, self.errors, strict=True,
                )
            ],
        }  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """Cost of a measurement that has not been made: layers run over all samples, and their operations;
    seconds of reading and decoding weights, and of all where it is computed on this machine's CPU (None:
    not known); bytes of disk. Before it come `calibrations`, of formats whose codes are found as --gptq
    does: neither operations nor seconds count them, and disk counts what they write."""

    forwards: int
    operations: float
    reading: float
    seconds: float | None
    disk: int
    calibrations: int = 0

    def as_object(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Fitting:
    """A model ready to be measured for a runtime, on `tp` ranks, with `formats` to choose from; `base`
    is a folder for what is measured. With `calibrates` the samples also find codes of what is chosen."""

    checkpoint: Checkpoint
    consumer: Consumer
    data: DataSpec
    formats: tuple[str, ...]
    tp: int
    machine: Machine
    base: Path
    memory: int | None = None
    devices: tuple[str, ...] = ()
    loader: RuntimeLoader | None = None
    notice: Callable[[str], None] | None = None
    calibrates: bool = False

    @cached_property
    def model(self) -> Model:
        return model_of(self.checkpoint, self.consumer)

    @cached_property
    def allowed(self) -> Allowed:
        return allowed_forms(
            self.checkpoint, self.model, self.formats, self.consumer, self.machine, self.tp,
            self.loader,
        )  # fmt: skip

    @cached_property
    def made(self) -> dict[str, Encoded]:
        """The model in each format that some part may have."""
        used = {name for names in self.allowed.forms.values() for name in names}
        if not used:
            raise PlanError(f"no format fits: {next(iter(self.allowed.refused.values()), '')}")
        return {
            form.name: encoded_in(self.model, form, self.allowed)
            for form in FORMS
            if form.name in used
        }

    @cached_property
    def choices(self) -> Choices:
        return choices_of(self.model, self.made)

    @cached_property
    def folder(self) -> Path:
        """The folder of this measurement, by a hash of all that decides it: headers, sizes and times of
        the source's files, data, formats of each group, this version."""
        checkpoint = self.checkpoint
        said = {
            "version": [__version__, _FORM],
            "headers": checkpoint.header_digest,
            "files": [
                [shard.path.name, shard.size, _time_of(shard.path)] for shard in checkpoint.shards
            ],
            "data": digest(self.data, checkpoint.root),
            "calibrates": digest_of(self.calibration, checkpoint.root) if self.calibrates else None,
            "groups": [
                [group.name, *forms]
                for group, forms in zip(self.model.groups, self.choices.forms, strict=True)
            ],
        }
        text = json.dumps(said, sort_keys=True).encode()
        return self.base / xxhash.xxh3_128_hexdigest(text)

    def kept(self) -> Measured | None:
        """Return what an earlier run has measured. Raises RunError for a file that is damaged."""
        file = self.folder / _MEASURED
        if not file.is_file():
            return None
        try:
            return Measured.read(
                parse_object(read_regular(file, error=RunError), file, error=RunError)
            )
        except (KeyError, TypeError) as error:
            raise RunError(f"{file}: is no measurement ({error}); remove {self.folder}") from error

    def estimate(self) -> Estimate:
        """Cost of a measurement."""
        dims = self.model.plan.role_index.dims
        each, layers = sizes_of(self.model.plan, {}), dims.num_layers
        per_token = 2 * sum(one.own + one.routed * 3.0 * one.hidden * one.middle for one in each)
        runs = forwards(self.model, self.made, layers)
        tokens = most_tokens(self.data)
        total = runs / max(1, layers) * per_token * tokens
        rows = hidden_rows(self.model, self.made, layers)
        on_cpu = not count_gpus() if not self.devices else set(self.devices) == {"cpu"}
        linears, experts = weights_read(self.model, self.made)
        reading = _READ * (linears + experts / min(READING, os.cpu_count() or 1))
        seconds = reading + total / _rate() if on_cpu else None
        solved = [plan.bytes_out for plan in self._solved_plans.values()]
        disk = 4 * rows * tokens * dims.hidden_size + sum(solved)
        return Estimate(runs, total, reading, seconds, disk, len(solved))

    def measured(self, events: Events | None = None) -> Measured:
        """Raises PlanError for a model that cannot be run a layer at a time, DataError for the data,
        RunError for too little memory, OutputError where another run is at work."""
        if (found := self.kept()) is not None:
            return found
        with self._locked():
            if (found := self.kept()) is not None:
                return found
            given = self._side, self.model, self._with_codes(events or NoEvents())
            more: dict[str, Any] = {
                "memory": self.memory, "devices": self._devices, "events": events or NoEvents(),
            }  # fmt: skip
            found = measure(*given, self.tokens, self.folder, **more)
            smallest = {
                number: min(zip(sizes, forms, strict=True))[1]
                for number, (forms, sizes) in enumerate(
                    zip(self.choices.forms, self.choices.nbytes, strict=True)
                )
            }
            alone = sum(cost[smallest[n]] for n, cost in enumerate(found.costs()))
            together = mixture_kl(*given, smallest, self.tokens, self.folder, **more)
            found = replace(found, alone=alone, together=together)
            write_whole(self.folder / _MEASURED, [json.dumps(found.as_object()).encode()], Files())
            for left in (*self.folder.glob("*.rows"), self.folder / STATE):
                left.unlink(missing_ok=True)
        return found

    def mixture_kl(self, chosen: Sequence[int], events: Events | None = None) -> float:
        """KL of a choice, measured: of all groups together. Raises as `measured` does."""
        names = {
            number: forms[one]
            for number, (forms, one) in enumerate(zip(self.choices.forms, chosen, strict=True))
        }
        key = xxhash.xxh3_128_hexdigest(json.dumps(names).encode())
        file = self.folder / _MIXTURES
        with self._locked():
            known: dict[str, Any] = {}
            if file.is_file():
                known = parse_object(read_regular(file, error=RunError), file, error=RunError)
            if key not in known:
                made = self._with_codes(events or NoEvents())
                known[key] = mixture_kl(
                    self._side, self.model, made, names, self.tokens, self.folder,
                    memory=self.memory, devices=self._devices, events=events or NoEvents(),
                )  # fmt: skip
                write_whole(file, [json.dumps(known).encode()], Files())
        return float(known[key])

    @cached_property
    def tokens(self) -> list[Any]:
        return load_tokens(self.data, self.checkpoint.root, self.notice or (lambda _: None))

    @cached_property
    def _devices(self) -> tuple[str, ...]:
        check_devices(self.devices)
        return tuple(dict.fromkeys(self.devices)) or found_devices()

    @cached_property
    def _side(self) -> Side:
        require(
            "calibrate", "fit runs the model as transformers computes it", "torch", "transformers"
        )
        check_runs(self.model.plan)
        silence_transformers()
        plan, checkpoint = self.model.plan, self.checkpoint
        return Side(checkpoint, checkpoint, None, plan, TextModel(plan, plan, "float32"))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"{self.folder}: cannot be written ({error.strerror}); name another folder "
                "(--measured DIR)"
            ) from error
        lock = take_lock(self.folder / _LOCK)
        if lock is None:
            raise OutputError(f"{self.folder}: was removed while it was waited for; start again")
        with closing(lock):
            yield

    # --- the choice

    def fit(self, budget: Budget, events: Events | None = None) -> Fit:
        """The best choice under a budget. Raises PlanError where the smallest formats are too much, and
        for a mixture that the runtime does not load; and as `measured` does."""
        measured = self.measured(events)
        costs = measured.costs()
        options = self.choices.options(costs)
        limit = _Limit.of(self, budget)
        room = limit.room
        for _ in range(_ATTEMPTS):
            solution = solve(options, room)
            steps = steps_of(self.model, by_form(self.model, self.choices, solution.chosen))
            held = limit.held(steps, solution)
            if held.over <= 0:
                break
            room = min(room, solution.nbytes) - held.over
        else:
            raise PlanError(f"budget: no choice was found of {budget}; give a little more")
        choice = held.choice
        predicted = sum(
            cost[forms[number]]
            for cost, forms, number in zip(costs, self.choices.forms, solution.chosen, strict=True)
        )
        notes = list(self._notes())
        line = ""
        if choice is not None and choice.unknown:
            notes.append(choice.unknown)
        elif choice is not None:
            answer = choice.answers[self.tp]
            line = launch(self.consumer.name, "OUT", self.tp, option=answer.required_flag)
        solved = self._solved(by_form(self.model, self.choices, solution.chosen), steps)
        return Fit(
            self.model, self.allowed, self.choices, tuple(costs), measured.errors, solution, budget,
            self.consumer, self.tp, held.nbytes, measured.joint(predicted),
            self.mixture_kl(solution.chosen, events), sum(one.size for one in self.tokens),
            held.rank_bytes, limit.cache, line, tuple(notes), solved.steps, measured, solved.groups,
        ).stated(self._data)  # fmt: skip

    @property
    def _data(self) -> str:
        return "random token ids (a trial)" if self.data.synthetic else "text"

    def _solved(self, chosen: Mapping[str, Sequence[Group]], steps: tuple[Pass, ...]) -> Solved:
        """The steps that write a choice, `steps` where codes are rounded."""
        if not self.calibrates:
            return Solved(steps, {})
        return solved_steps(self.model, chosen, self.calibration)

    @cached_property
    def calibration(self) -> Calibration:
        """A calibration with other samples of the same data than those of the measurement, and more."""
        asked = {one.name: getattr(self.data, one.name) for one in fields(DataSpec)}
        asked |= {"samples": _SAMPLES * self.data.samples, "seed": (self.data.seed + 1) % 2**32}
        return Calibration(**asked, devices=self.devices)

    @cached_property
    def _solved_plans(self) -> dict[str, Plan]:
        """Conversions to each format of all groups, of formats for which a calibration finds codes."""
        found = {}
        for form in FORMS if self.calibrates else ():
            if form.name in self.made:
                numbers = self.made[form.name].nbytes
                groups = {form.name: [self.model.groups[number] for number in numbers]}
                solved = solved_steps(self.model, groups, self.calibration)
                if solved.groups:
                    found[form.name] = run_passes(
                        Plan.identity(self.checkpoint), solved.steps
                    ).check()
        return found

    def _with_codes(self, events: Events) -> dict[str, Encoded]:
        """The model in each format, with calibrated codes where there are some: in folders that are
        kept, and that an interrupted run goes on with."""
        found = dict(self.made)
        for name, plan in self._solved_plans.items():
            at = self.folder / name
            events.phase(f"calibrating {name}")
            options = RunOptions(memory=self.memory)
            execute(plan, at, options, events=events, backend=backend_for([plan]))
            found[name] = replace(found[name], codes=Plan.identity(Checkpoint.open(at)))
        return found

    def _notes(self) -> Iterator[str]:
        if self.allowed.unknown:
            yield f"{self.allowed.unknown}; start the server to try"
        if self.data.synthetic:
            yield "measured on random token ids, for trials: give --data FILE to measure on real text"


def _time_of(path: Path) -> int:
    """When a file was last written, 0 for one that is elsewhere."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _rate() -> float:
    """Operations a second of this machine in F32, a multiplication and an addition each, by numpy."""
    import numpy as np

    a = np.ones((512, 1024), np.float32)
    b = np.ones((1024, 1024), np.float32)
    a @ b
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 0.1:
        a @ b
        count += 1
    one = 2.0 * 512 * 1024 * 1024 * count / (time.perf_counter() - start)
    threads = 1 if os.environ.get("OPENBLAS_NUM_THREADS") == "1" else 0
    return one * (len(os.sched_getaffinity(0)) if threads else 1)


# --- Budgets --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Held:
    """Bytes of a choice's files, and of its fullest rank; by how many bytes it is over its budget; what
    the runtime says of it (None: it was not asked)."""

    nbytes: int
    over: int
    choice: Choice | None
    rank_bytes: int = 0


@dataclass(frozen=True)
class _Limit:
    """A budget for a model: `room` are bytes that the solver may give the groups, or a little more than
    it may; `cache` bytes of the KV cache on a rank."""

    fitting: Fitting
    budget: Budget
    room: int
    cache: int = 0

    @classmethod
    def of(cls, fitting: Fitting, budget: Budget) -> _Limit:
        model = fitting.model
        if budget.bits is not None:
            return cls(fitting, budget, int(budget.bits * model.weights / 8))
        if budget.nbytes is not None:
            return cls(fitting, budget, budget.nbytes - model.rest)
        cache = 0 if budget.context is None else cache_bytes(fitting.checkpoint, budget)
        most = model.rest + sum(max(sizes) for sizes in fitting.choices.nbytes)
        limit = cls(fitting, budget, most, cache)
        if limit.of_rank <= 0:
            raise PlanError(
                f"budget: {format_size(cache)} of KV cache on each GPU leave no room for weights; give "
                "a shorter --context or more GPUs"
            )
        return limit

    @property
    def of_rank(self) -> int:
        """Bytes of weights that a rank may hold."""
        assert self.budget.gpu_memory is not None
        if self.budget.context is None:
            return int(self.budget.gpu_memory * FOR_WEIGHTS)
        return int(self.budget.gpu_memory * FOR_SERVING) - self.cache

    def held(self, steps: Sequence[Pass], solution: Solution) -> _Held:
        """Raises PlanError for a mixture that the runtime does not load, and, for a budget of GPUs,
        where that is not known."""
        fitting, tp = self.fitting, self.fitting.tp
        plan = run_passes(fitting.model.plan, steps[len(fitting.model.before) :]) if steps else (
            fitting.model.plan
        )  # fmt: skip
        wanted = fitting.model.rest + solution.nbytes
        if plan.bytes_out != wanted:
            raise PlanError(
                f"the chosen formats take {plan.bytes_out} bytes, and {wanted} were counted; report this"
            )
        nbytes = considered_plan(plan).layout.nbytes
        if self.budget.nbytes is not None and nbytes > self.budget.nbytes:
            return _Held(nbytes, nbytes - self.budget.nbytes, None)
        choice = self._asked(steps)
        if choice is None or choice.unknown:
            if self.budget.gpus is not None:
                why = choice.unknown if choice is not None else "nothing is quantized"
                raise PlanError(f"budget: the bytes of a rank are not known ({why}); give --bytes")
            return _Held(nbytes, 0, choice)
        rank = choice.answers[tp].nbytes
        over = (rank - self.of_rank) * tp if self.budget.gpus is not None else 0
        return _Held(nbytes, over, choice, rank)

    def _asked(self, steps: Sequence[Pass]) -> Choice | None:
        """Return what the runtime says of a choice."""
        from qconvert.advise.advice import why_not

        fitting = self.fitting
        planned = few_experts(fitting.checkpoint) if fitting.loader is None else None
        choice = considered(
            planned or fitting.checkpoint, Candidate("fit" if steps else "", tuple(steps)),
            (fitting.tp,), fitting.machine, fitting.consumer, fitting.loader,
        )  # fmt: skip
        if choice.refused:
            raise PlanError(choice.refused)
        if not choice.unknown and fitting.tp not in choice.loads_at:
            raise PlanError(
                f"{fitting.consumer.name} does not load the mixture at tp {fitting.tp}: "
                f"{why_not(choice)[fitting.tp]}; choose of fewer formats (--formats)"
            )
        return choice


def cache_bytes(checkpoint: Checkpoint, budget: Budget) -> int:
    """Bytes of a KV cache in BF16 for the budget's context, on each GPU: keys and values of the heads
    that a rank has, of layers with full attention (those with a window are counted as such); of
    multi-head latent attention the compressed vector and its rotary part, which every rank has whole.
    Raises PlanError where the config does not tell."""
    assert budget.context is not None
    assert budget.gpus is not None
    text, dims = text_config(checkpoint.config), checkpoint.role_index.dims
    layers = len(dims.groups.get("full_attention", ())) or dims.num_layers

    def size(name: str) -> int:
        found = text.get(name)
        return found if type(found) is int and found > 0 else 0

    if size("kv_lora_rank"):
        each = size("kv_lora_rank") + size("qk_rope_head_dim")
        return 2 * layers * each * budget.context
    heads = size("num_key_value_heads") or size("num_attention_heads")
    width = size("head_dim")
    if not width and size("num_attention_heads"):
        width = size("hidden_size") // size("num_attention_heads")
    if not heads or not width:
        raise PlanError(
            "config.json states no num_key_value_heads and head_dim, so the KV cache's size is not "
            "known: leave --context out, which keeps a quarter of each GPU"
        )
    return 2 * 2 * layers * -(-heads // budget.gpus) * width * budget.context


def runtime_of(consumer: Consumer) -> Consumer:
    """Raises UsageError for a runtime whose loader is not simulated."""
    if consumer.name not in SIMULATED:
        raise UsageError(
            f"--for {consumer.name}: a mixture is chosen for {' or '.join(SIMULATED)}, whose loaders "
            "are simulated"
        )
    return consumer
