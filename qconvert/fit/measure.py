"""Cost of a format in a group of modules: the KL divergence of the model's output, without a gradient.

The model runs once over a few samples, a decoder layer in memory at a time, in F32. At each layer
every group of it is put into every format in turn, and the error of the layer's output is taken. For
some of them the perturbed hidden states are then carried on through all layers behind, beside the clean
ones, and give a KL divergence of their own at the end. A small error's KL grows with its square, so
that of a format that is not carried follows from one that is, in the same group. KL of several groups
add up as long as they are small: errors of rounding do not know of one another.

What a format's weights are multiplied with is rounded as the runtimes do, where they do.

Hidden states lie in files. A state file is replaced when a layer is done, and an interrupted measurement
goes on from there, to the same figures.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qconvert.calibrate.activation_store import InFile, Rows
from qconvert.calibrate.memory import keep_nothing_freed, trim
from qconvert.calibrate.model import Layer
from qconvert.calibrate.reading import Weights
from qconvert.core.errors import RunError
from qconvert.core.json_text import parse_object
from qconvert.core.links import read_regular
from qconvert.evaluate.activations import before, rounding
from qconvert.evaluate.engine import Stream, finals_of, forward, rows_file, sizes_of
from qconvert.evaluate.head import CHUNK, Budget, divergences
from qconvert.evaluate.side import READING, Experts, LoadedSide, Side
from qconvert.fit.groups import STAY, Encoded, Group, Model
from qconvert.run.work.events import Events
from qconvert.run.work.files import Files, write_whole

if TYPE_CHECKING:
    import numpy as np
    import torch

    Tokens = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

STATE = "state.json"
# Formats are carried one by one up to so many (group, format) pairs; of more, one for each group.
DIRECT = 160
_TOGETHER = 16  # streams whose logits are computed together
Pair = tuple[int, str]  # a group's number, and a format


@dataclass(frozen=True)
class Measured:
    """Errors and KL by group and format. `errors` are of the layer's output, relative to it; `kl` in
    nats a token, of the pairs that were carried to the logits; `together` the KL of a run with every
    group in a format, `alone` the sum of those groups' own."""

    errors: tuple[Mapping[str, float], ...]
    kl: tuple[Mapping[str, float], ...]
    alone: float = 0.0
    together: float = 0.0

    def joint(self, total: float) -> float:
        """KL to be expected of several groups together whose own add up to `total`. What they fall
        short of it, or exceed it by, is measured once, in `together`, and taken to grow with the size of
        the error, the root of the KL, as the number of tokens does that a router gives other experts."""
        if not self.alone:
            return total
        part = sqrt(min(1.0, total / self.alone))
        return total * (1 + (self.together / self.alone - 1) * part)

    def costs(self) -> list[dict[str, float]]:
        """KL of each group in each format: measured, or that of the carried format times the square of
        the ratio of their errors; 0 as it is."""
        found = []
        for errors, kl in zip(self.errors, self.kl, strict=True):
            own = {STAY: 0.0}
            reference = max(kl, key=lambda form: errors[form], default=None)
            for form, error in errors.items():
                if form in kl:
                    own[form] = kl[form]
                elif reference is not None and errors[reference]:
                    own[form] = kl[reference] * (error / errors[reference]) ** 2
                else:
                    own[form] = 0.0
            found.append(own)
        return found

    def as_object(self) -> dict[str, Any]:
        return {
            "errors": [dict(one) for one in self.errors], "kl": [dict(one) for one in self.kl],
            "alone": self.alone, "together": self.together,
        }  # fmt: skip

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Measured:
        return cls(
            tuple(found["errors"]),
            tuple(found["kl"]),
            float(found["alone"]),
            float(found["together"]),
        )


def _pairs(model: Model, made: Mapping[str, Encoded], layer: int | None = None) -> list[Pair]:
    """Groups of a layer, or of all, each in every format that it may have."""
    return [
        (number, name)
        for number, group in enumerate(model.groups)
        if layer is None or group.layer == layer
        for name, one in made.items()
        if number in one.nbytes
    ]


def carried(model: Model, made: Mapping[str, Encoded]) -> frozenset[Pair]:
    """The pairs whose hidden states go through all layers behind: all of them, or of a large model the
    smallest format of each group, whose error is the largest."""
    pairs = _pairs(model, made)
    if len(pairs) <= DIRECT:
        return frozenset(pairs)
    smallest: dict[int, Pair] = {}
    for pair in pairs:
        before = smallest.setdefault(pair[0], pair)
        if made[pair[1]].nbytes[pair[0]] < made[before[1]].nbytes[pair[0]]:
            smallest[pair[0]] = pair
    return frozenset(smallest.values())


def forwards(model: Model, made: Mapping[str, Encoded], layers: int) -> int:
    """Return how many times a layer runs over all samples in a measurement."""
    streams, total = 1, 0
    some = carried(model, made)
    for layer in range(layers):
        own = _pairs(model, made, layer)
        total += streams + len(own)
        streams += sum(pair in some for pair in own)
    return total


def weights_read(model: Model, made: Mapping[str, Encoded]) -> tuple[int, int]:
    """Return how many weights a measurement and the two mixtures behind it read and decode: of linears,
    one after another, and of routed experts, which threads read. A layer with experts puts linears in
    place twice, before its experts and behind them."""
    sparse = {group.layer for group in model.groups if group.experts}
    linears = experts = 0
    for number, group in enumerate(model.groups):
        times = sum(number in one.nbytes for one in made.values())
        if group.experts:
            experts += (5 + times) * group.weights
        else:
            linears += (5 + times * (1 + (group.layer in sparse))) * group.weights
    return linears, experts


def hidden_rows(model: Model, made: Mapping[str, Encoded], layers: int) -> int:
    """Return how many float32 rows of hidden states a measurement's files hold for each token, at the
    most: of every stream what goes into a layer and comes out of it, of a layer with routed experts also
    what they get and answer, and what is tried in one layer alone."""
    some = carried(model, made)
    streams, most = 1, 0
    for layer in range(layers):
        own = _pairs(model, made, layer)
        linears = [pair for pair in own if not model.groups[pair[0]].experts]
        after = streams + sum(pair in some for pair in own)
        rows = streams + after + sum(pair not in some for pair in own)
        if len(linears) < len(own):
            rows += 2 * (streams + len(linears))
        streams, most = after, max(most, rows)
    return most


# --- Hidden states --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """Rows of a stream among those of several."""

    rows: Rows
    start: int

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.rows.read(self.start + start, self.start + stop)

    def write(self, start: int, rows: torch.Tensor) -> None:
        self.rows.write(self.start + start, rows)


def _copied(source: Rows, target: Rows, count: int) -> None:
    for start in range(0, count, CHUNK):
        target.write(start, source.read(start, min(start + CHUNK, count)))


def _apart(clean: Rows, other: Rows, count: int) -> float:
    """The norm of the difference of two streams, over the norm of the first."""
    off = size = 0.0
    for start in range(0, count, CHUNK):
        a, b = (rows.read(start, min(start + CHUNK, count)).double() for rows in (clean, other))
        off += float((b - a).square().sum())
        size += float(a.square().sum())
    return (off / size) ** 0.5 if size else float(off > 0)


# --- Groups in a format ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _OtherExperts:
    """Routed experts of one layer in a format, the others as they are."""

    base: Experts
    opened: LoadedSide
    made: Encoded
    weights: Weights

    threads = READING

    def matrix(self, layer: int, expert: int, kind: str) -> torch.Tensor:
        module = self.opened.projections[layer, expert, kind].module
        with self.weights.lent() as weights:
            return weights.matrix(module, self.made.stored(module))[0]


@contextmanager
def _changed(
    opened: LoadedSide, layer: Layer, group: Group, made: Encoded, weights: Weights
) -> Iterator[LoadedSide]:
    """Within this, a group of a layer is in a format, read by `weights`: its linears are replaced, with
    what goes into them, and the side that is given has its experts."""
    import torch

    model, rounds = opened.layers.model, rounding(made.inputs)
    held: list[tuple[Any, torch.nn.Parameter]] = []
    try:
        for module in group.modules:
            linear = layer.module.get_submodule(model.inside(layer.number, module))
            weight = weights.matrix(module, made.stored(module))[0]
            held.append((linear, linear.weight))
            linear.weight = torch.nn.Parameter(weight.to(linear.weight), False)
        with before((linear, rounds) for linear, _ in held):
            if group.experts:
                assert opened.experts is not None
                experts = _OtherExperts(opened.experts, opened, made, weights)
                yield replace(opened, experts=experts, rounds=rounds)
            else:
                yield opened
    finally:
        for linear, weight in held:
            linear.weight = weight


# --- The measurement ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """A model at work on samples; `together` experts at a time on each device."""

    opened: LoadedSide
    model: Model
    made: Mapping[str, Encoded]
    tokens: Sequence[Tokens]
    together: Sequence[int]
    events: Events
    budget: Budget
    codes: Mapping[str, Weights]  # readers of what was made of formats

    def weights(self, form: str) -> Weights:
        return self.codes.get(form, self.opened.weights)

    @property
    def lengths(self) -> list[int]:
        return [sample.size for sample in self.tokens]

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def layers(self) -> int:
        return self.opened.side.model.layers

    @property
    def hidden(self) -> int:
        return self.opened.layers.hidden

    def through(self, opened: LoadedSide, layer: Layer, streams: Sequence[Stream]) -> None:
        """Run a layer over some streams."""
        forward(opened, layer, streams, together=self.together, tell=self.events.wrote)
        trim()

    def stream(self, states: Rows, following: Rows, count: int = 1) -> Stream:
        """The samples as one stream, or `count` times, one after another in the files."""
        return Stream(self.lengths * count, states, following)

    def layer(self, number: int) -> Layer:
        return self.opened.side.model.layer(number, self.opened.weights, self.opened.layers.device)

    def file(self, number: int, streams: int, *, new: bool = True) -> InFile:
        return rows_file(self.opened, f"hidden.{number}", streams * self.total, new=new)

    def embedded(self) -> InFile:
        states = self.file(0, 1)
        at = 0
        for sample in self.tokens:
            states.write(at, self.opened.layers.model.embed(sample, self.opened.weights))
            at += sample.size
        return states

    def kl(self, states: Rows, streams: int) -> list[float]:
        """KL(clean || stream) in nats a token of each stream behind the first, the clean one."""
        found: list[float] = []
        with ExitStack() as stack:

            def finals(number: int) -> InFile:
                part = _Part(states, number * self.total)
                file = finals_of(self.opened, part, self.tokens, f"finals.{number}")
                stack.callback(file.path.unlink)
                stack.callback(file.close)
                return file

            clean = finals(0)
            for first in range(1, streams, _TOGETHER):
                some = [finals(number) for number in range(first, min(first + _TOGETHER, streams))]
                found += divergences(self.opened, clean, some, self.budget.tokens())
                self.events.wrote(len(some) * len(self.tokens))
        return found


def measure(
    side: Side,
    model: Model,
    made: Mapping[str, Encoded],
    tokens: Sequence[Tokens],
    folder: Path,
    *,
    memory: int | None,
    devices: Sequence[str],
    events: Events,
) -> Measured:
    """Errors and KL of every group in every format that it may have (`made`, by name), over samples of
    token ids, each int64 [length]. `folder` holds hidden states, and how far it has come: it is this
    measurement's alone.

    Raises RunError where `memory`, in bytes, or the folder's disk is too small, before anything is
    run, and for hidden states that are not finite; PlanError for a model that cannot be run a layer at a
    time."""
    with _running(side, model, made, tokens, folder, memory, devices, events) as run:
        runs = forwards(model, made, run.layers) + len(carried(model, made))
        _check_disk(folder, 4 * hidden_rows(model, made, run.layers) * run.total * run.hidden)
        events.start(runs * len(tokens), 0)
        state = _State.read(folder, len(model.groups))
        streams = 1 + len(state.streams)
        states = run.file(state.layer, streams, new=False) if state.layer else run.embedded()
        try:
            some = carried(model, made)
            for number in range(state.layer, run.layers):
                events.phase(f"layer {number} of {run.layers}")
                following, state = _one_layer(run, number, states, state, some)
                following.sync()
                state.write(folder)
                states.close()
                states.path.unlink()
                states = following
            events.phase("logits")
            kl = run.kl(states, 1 + len(state.streams))
        finally:
            states.close()
    found: list[dict[str, float]] = [{} for _ in model.groups]
    for (group, name), value in zip(state.streams, kl, strict=True):
        found[group][name] = value
    return Measured(tuple(state.errors), tuple(found))


def mixture_kl(
    side: Side,
    model: Model,
    made: Mapping[str, Encoded],
    chosen: Mapping[int, str],
    tokens: Sequence[Tokens],
    folder: Path,
    *,
    memory: int | None,
    devices: Sequence[str],
    events: Events,
) -> float:
    """KL in nats a token of the model with all of these groups in their formats, by the group's number.
    Raises as `measure` does."""
    with _running(side, model, made, tokens, folder, memory, devices, events) as run:
        events.start((2 * run.layers + 1) * len(tokens), 0)
        first = run.embedded()
        states = rows_file(run.opened, "mixture.0", 2 * run.total)
        for stream in range(2):
            _copied(first, _Part(states, stream * run.total), run.total)
        first.close()
        first.path.unlink()
        try:
            for number in range(run.layers):
                events.phase(f"layer {number} of {run.layers} of the chosen mixture")
                following = rows_file(run.opened, f"mixture.{number + 1}", 2 * run.total)
                layer = run.layer(number)
                run.through(run.opened, layer, [run.stream(states, following)])
                second = run.stream(_Part(states, run.total), _Part(following, run.total))
                with _all_changed(run, layer, chosen) as opened:
                    run.through(opened, layer, [second])
                states.close()
                states.path.unlink()
                states = following
            (found,) = run.kl(states, 2)
        finally:
            states.close()
            states.path.unlink(missing_ok=True)
    return found


def _check_disk(folder: Path, need: int) -> None:
    """Raise RunError where a folder has no room for hidden states of so many bytes, those that an
    interrupted run has left there counted in."""
    left = sum(file.stat().st_size for file in folder.glob("*.rows"))
    free = shutil.disk_usage(folder).free + left
    if need > free:
        raise RunError(
            f"{folder}: hidden states take up to {need >> 20} MiB, and {free >> 20} MiB are free; name "
            "a folder on a larger disk (--measured DIR), or give fewer --samples"
        )


@contextmanager
def _all_changed(run: _Run, layer: Layer, chosen: Mapping[int, str]) -> Iterator[LoadedSide]:
    with ExitStack() as stack:
        opened = run.opened
        for number, name in chosen.items():
            group = run.model.groups[number]
            if group.layer == layer.number and name != STAY:
                made, weights = run.made[name], run.weights(name)
                opened = stack.enter_context(_changed(opened, layer, group, made, weights))
        yield opened


@contextmanager
def _running(
    side: Side, model: Model, made: Mapping[str, Encoded], tokens: Sequence[Tokens], folder: Path,
    memory: int | None, devices: Sequence[str], events: Events,
) -> Iterator[_Run]:  # fmt: skip
    keep_nothing_freed()
    lengths = [sample.size for sample in tokens]
    sizes = sizes_of([side], max(lengths))
    # In F32 all is twice as large as in the BF16 that is counted there.
    sizes = replace(
        sizes, layer=2 * sizes.layer, parameter=2 * sizes.parameter, middle=2 * sizes.middle,
        widest=2 * sizes.widest,
    )  # fmt: skip
    budget = Budget.of(memory, sizes)
    together = [budget.experts(device) for device in devices]
    with ExitStack() as stack:
        opened = stack.enter_context(side.opened(lengths, folder, devices))
        codes = {
            name: stack.enter_context(closing(Weights(one.codes)))
            for name, one in made.items()
            if one.codes is not None
        }
        yield _Run(opened, model, made, tokens, together, events, budget, codes)


def _one_layer(
    run: _Run, number: int, states: InFile, state: _State, some: frozenset[Pair]
) -> tuple[InFile, _State]:
    """Run a layer over all streams, and over the clean one with each of its groups in each format."""
    groups = run.model.groups
    own = _pairs(run.model, run.made, number)
    new = [pair for pair in own if pair in some]
    tried = [pair for pair in own if pair not in some]
    before = 1 + len(state.streams)
    following = run.file(number + 1, before + len(new))
    scratch = rows_file(run.opened, "tried", len(tried) * run.total)
    targets = {
        pair: _Part(file, (first + place) * run.total)
        for file, first, pairs in ((following, before, new), (scratch, 0, tried))
        for place, pair in enumerate(pairs)
    }
    layer = run.layer(number)

    def changed(pair: Pair) -> AbstractContextManager[LoadedSide]:
        made, weights = run.made[pair[1]], run.weights(pair[1])
        return _changed(run.opened, layer, groups[pair[0]], made, weights)

    errors = [dict(one) for one in state.errors]
    try:
        # All streams that routed experts answer as they are.
        streams = [run.stream(states, following, before)]
        streams += [
            replace(run.stream(states, targets[pair]), changed=partial(changed, pair))
            for pair in own
            if not groups[pair[0]].experts
        ]
        run.through(run.opened, layer, streams)
        for pair in own:
            if groups[pair[0]].experts:
                with changed(pair) as opened:
                    run.through(opened, layer, [run.stream(states, targets[pair])])
            error = _apart(following, targets[pair], run.total)
            if not isfinite(error):
                raise RunError(
                    f"{groups[pair[0]].name} in {pair[1]}: hidden states are not finite; check the "
                    "source with qconvert validate --level full"
                )
            errors[pair[0]][pair[1]] = error
    finally:
        scratch.close()
        scratch.path.unlink()
    return following, _State(number + 1, (*state.streams, *new), tuple(errors))


@dataclass(frozen=True)
class _State:
    """State of a measurement: what goes into `layer` is in files, the clean stream and those of
    `streams`; `errors` by group."""

    layer: int
    streams: tuple[Pair, ...]
    errors: tuple[Mapping[str, float], ...]

    @classmethod
    def read(cls, folder: Path, groups: int) -> _State:
        """Raises RunError for a file that is damaged."""
        file = folder / STATE
        if not file.is_file():
            return cls(0, (), tuple({} for _ in range(groups)))
        found = parse_object(read_regular(file, error=RunError), file, error=RunError)
        try:
            streams = tuple((int(group), str(name)) for group, name in found["streams"])
            return cls(int(found["layer"]), streams, tuple(map(dict, found["errors"])))
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"{file}: is no state of a measurement ({error}); remove {folder}"
            ) from error

    def write(self, folder: Path) -> None:
        text = json.dumps(
            {
                "layer": self.layer,
                "streams": [list(pair) for pair in self.streams],
                "errors": [dict(one) for one in self.errors],
            }
        )
        write_whole(folder / STATE, [text.encode()], Files())
