"""A source and models made from it on the same tokens, a decoder layer of each in turn: from what a user
names to the result.

Hidden states of each lie in a file, BF16, as in a calibration; what is compared after a layer are the
files. What is in memory at a time is one layer of one model, and some of its experts; at the end a slice
of all heads.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from qconvert.calibrate.activation_store import InFile, Rows, ScratchRows
from qconvert.calibrate.backend import silence_transformers
from qconvert.calibrate.devices import check_devices, found_devices
from qconvert.calibrate.experts import Expert, ExpertQuantizer, RoutedInputs
from qconvert.calibrate.kernel_choice import linear
from qconvert.calibrate.layers import LayerStream
from qconvert.calibrate.memory import keep_nothing_freed, trim
from qconvert.calibrate.model import Layer, class_config
from qconvert.calibrate.token_dispatch import dispatch_of
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import CheckpointError, DataError, PlanError, RunError, UsageError
from qconvert.core.extras import require
from qconvert.core.family import text_config
from qconvert.core.links import read_regular
from qconvert.evaluate.activations import StatedInputs, as_stated
from qconvert.evaluate.head import CHUNK, Budget, Scores, Sizes, scored
from qconvert.evaluate.paired import differences_of
from qconvert.evaluate.result import (
    NOTHING_ROUNDED,
    WEIGHTS_AND_ACTIVATIONS,
    WEIGHTS_ONLY,
    Evaluation,
    distance,
    logits_of,
)
from qconvert.evaluate.side import Experts, LoadedSide, Rounds, Side, side_of
from qconvert.evaluate.task import Task, load_task, result_of
from qconvert.run.work.events import Events, NoEvents
from qconvert.samples.data import digest, load_tokens
from qconvert.samples.request import DataSpec
from qconvert.samples.tokenizer import MOST_TOKENIZER, tokenizer_files

if TYPE_CHECKING:
    import numpy as np
    import torch

    Tokens = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


# One decoder layer of one model over all samples: attention and router, then its experts, some at a
# time, as calibration runs them, but that nothing is counted or solved.

# Tokens that the class's own experts answer too.
_CHECKED = 16

Tell = Callable[[int], None]


@dataclass(frozen=True)
class Stream:
    """Samples of `lengths` on their way through a layer: what goes into it, and what goes into the next
    one; `changed` is entered whenever the layer itself runs over them."""

    lengths: Sequence[int]
    states: Rows
    following: Rows
    changed: Callable[[], AbstractContextManager[object]] = nullcontext


def forward(
    opened: LoadedSide,
    layer: Layer,
    streams: Sequence[Stream],
    *,
    together: Sequence[int],
    tell: Tell,
) -> None:
    """Run a layer over some streams. Its routed experts are read once for all of them, which is most of
    what a large model's layer takes. `together` is how many experts each device has at a time; `tell` is
    called with samples as they are done."""
    by_stream = [replace(opened.layers, lengths=stream.lengths) for stream in streams]
    number, device = layer.number, opened.layers.device
    if not layer.sparse:
        for stream, layers in zip(streams, by_stream, strict=True):
            with stream.changed():
                for batch, hidden, call in layers.through(number, stream.states):
                    following = layer.forward(hidden, call).flatten(0, 1)
                    stream.following.write(batch.start, following)
                    tell(batch.count)
        return
    if opened.experts is None:
        raise PlanError(
            f"layer {number}: {type(layer.module).__name__} has routed experts, and the checkpoint none "
            "there; evaluate the model as it was published"
        )
    import torch

    scratch = ScratchRows(opened.layers.folder, {}, opened.layers.files)
    try:
        inside: list[LayerStream] = []
        for place, (stream, layers) in enumerate(zip(streams, by_stream, strict=True)):
            with stream.changed():
                routed = layers.attend(layer, stream.states, scratch, f"{place}.")
            name, dtype = f"{place}.answers", layers.model.dtype
            answers = scratch.rows(name, layers.total, layers.hidden, dtype)
            inside.append(LayerStream(routed, answers))
        samples = sum(len(stream.lengths) for stream in streams)
        with torch.no_grad():
            _answer(opened, opened.experts, layer, inside, together, samples, tell)
            for stream, layers, own in zip(streams, by_stream, inside, strict=True):
                with stream.changed():
                    for batch, hidden, call in layers.through(number, stream.states):
                        answer = own.answers.read(batch.start, batch.stop).to(device)
                        following = layer.joined(hidden, call, answer).flatten(0, 1)
                        stream.following.write(batch.start, following)
    finally:
        scratch.close()
    trim()


def _answer(
    opened: LoadedSide,
    experts: Experts,
    layer: Layer,
    streams: Sequence[LayerStream],
    together: Sequence[int],
    samples: int,
    tell: Tell,
) -> None:
    """Return what every expert answers to its tokens, added up in the order of their numbers; of so many
    samples in all."""
    layers, rounds = opened.layers, opened.rounds

    def middle(device: str) -> Rounds:
        plain = layer.middle(device)
        return plain if rounds is None else lambda rows: rounds(plain(rows))

    quantizers = [
        ExpertQuantizer(
            device, layer, middle(device), (), layers.settings, layers.reader, layers.clock
        )
        for device in opened.devices
    ]
    counts = zip(*(stream.routed.counts for stream in streams), strict=True)
    used = [number for number, tokens in enumerate(counts) if any(tokens)]
    at = told = 0
    while at < len(used):
        first, groups = at == 0, []
        for quantizer, most in zip(quantizers, together, strict=True):
            mine = used[at : at + most]
            dtype = layers.model.dtype
            groups.append(list(_read(experts, layer.number, mine, quantizer.device, dtype)))
            at += len(mine)
        if first and rounds is None:  # which the class itself does not do
            _check(layer, quantizers[0], groups[0][0], streams[0].routed)
        pairs = list(zip(quantizers, groups, strict=True))
        for stream in streams:
            _add(stream, pairs, rounds)
        done = samples * at // len(used)
        tell(done - told)
        told = done
        del groups, pairs
        trim()


def _add(
    stream: LayerStream,
    groups: Sequence[tuple[ExpertQuantizer, Sequence[Expert]]],
    rounds: Rounds | None,
) -> None:
    """Add what some experts of each device answer to a stream's tokens."""
    routed = stream.routed
    for start, stop in routed.chunks:
        rows = stream.answers.read(start, stop)
        for quantizer, group in groups:
            with quantizer.clock("forward", quantizer.device) as tick:
                routes, weights, inputs, rows = (
                    one.to(quantizer.device)
                    for one in (
                        routed.experts.read(start, stop),
                        routed.weights.read(start, stop),
                        routed.inputs.read(start, stop),
                        rows,
                    )
                )
                if rounds is not None:
                    inputs = rounds(inputs)
                slots = dispatch_of(routes, weights, len(routed.counts))
                quantizer.answer(group, rows, inputs, slots, tick)
        stream.answers.write(start, rows)


def _check(layer: Layer, quantizer: ExpertQuantizer, expert: Expert, routed: RoutedInputs) -> None:
    """That the class's own experts answer what is computed here. Hidden states that are not finite are
    found after the layer."""

    rows = routed.inputs.read(0, min(_CHECKED, routed.chunks[0][1])).to(quantizer.device)
    if not bool(rows.isfinite().all()):
        return
    made = linear(quantizer.middle(linear(rows, expert.gate_up)), expert.down)
    layer.check(made, rows, expert.gate_up, expert.down)


def _read(
    experts: Experts, layer: int, numbers: Sequence[int], device: str, dtype: torch.dtype
) -> Iterator[Expert]:
    """Experts in the order of their numbers. Threads read and decode them, as many as there are cores:
    torch's products leave them idle."""
    import torch

    def read(number: int) -> Expert:
        gate = experts.matrix(layer, number, "gate_proj")
        middle, hidden = gate.shape
        both = torch.empty(2 * middle, hidden, dtype=dtype, device=device)
        both[:middle].copy_(gate)
        both[middle:].copy_(experts.matrix(layer, number, "up_proj"))
        down = experts.matrix(layer, number, "down_proj").to(device, dtype)
        return Expert(number, both, down, False, {})

    threads = min(experts.threads, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, "qconvert-experts") as pool:
        yield from pool.map(read, numbers)


@dataclass(frozen=True)
class LayerErrors:
    """Relative errors of one model's hidden states by layer, and the scores of all tokens that are
    followed by one, None where not all layers were run."""

    hidden: tuple[float, ...]
    scores: Scores | None


def compare(
    sides: Sequence[Side],
    tokens: Sequence[Tokens],
    *,
    layers: int | None,
    memory: int | None,
    devices: Sequence[str],
    events: Events,
    inputs: Sequence[StatedInputs | None],
) -> list[LayerErrors]:
    """Run samples of token ids, each int64 [length], through the first `layers` of a source, the first
    side, and of the others (None: all, and the head) on devices of torch, the first of which does all
    but experts; `inputs` are those of `last_states`. Returns what each other is apart from the source.

    Raises RunError where `memory`, in bytes, or the disk of TMPDIR is too small, before anything is run,
    and for hidden states that are not finite; PlanError for models that cannot be run.
    """
    count = sides[0].model.layers if layers is None else layers
    if layers is None:
        _check_heads(sides)
    hidden: list[list[float]] = []
    scores: Sequence[Scores | None] = [None] * (len(sides) - 1)
    lengths = [sample.size for sample in tokens]

    def apart(opened: Sequence[LoadedSide], states: Sequence[InFile], number: int) -> None:
        hidden.append(_apart(opened, states, number, lengths))

    with last_states(
        sides, tokens, count=count, memory=memory, devices=devices, events=events, after=apart,
        inputs=inputs,
    ) as (opened, states, budget):  # fmt: skip
        if layers is None:
            events.phase("logits")
            scores = _scores(opened, states, tokens, budget)
    by_side = zip(*hidden, strict=True)
    return [LayerErrors(one, score) for one, score in zip(by_side, scores, strict=True)]


@contextmanager
def last_states(
    models: Sequence[Side],
    tokens: Sequence[Tokens],
    *,
    count: int,
    memory: int | None,
    devices: Sequence[str],
    events: Events,
    after: Callable[[Sequence[LoadedSide], Sequence[InFile], int], None],
    inputs: Sequence[StatedInputs | None],
    jitter: bool = False,
) -> Iterator[tuple[Sequence[LoadedSide], Sequence[InFile], Budget]]:
    """Within this the models are open, and the hidden states that come out of their first `count` layers
    lie in files; `after` is called with those of each layer. Activations of a model are rounded as its
    `inputs` say of modules (None: they are not). With `jitter` the lowest bits of what goes into the
    first layer of the last model are drawn at random: what comes out then differs by what rounding does,
    in any order of sums. Raises as `compare` does."""
    keep_nothing_freed()
    lengths = [sample.size for sample in tokens]
    budget = Budget.of(memory, sizes_of(models, max(lengths)))
    with tempfile.TemporaryDirectory(prefix="qconvert-eval-") as where, ExitStack() as stack:
        _check_disk(Path(where), sum(lengths), models)
        sides = []
        for number, side in enumerate(models):
            folder = Path(where) / str(number)
            folder.mkdir()
            sides.append(stack.enter_context(side.opened(lengths, folder, devices)))
        events.start(len(models) * count * len(lengths), 0)
        states = [_embedded(opened, jitter and opened is sides[-1], tokens) for opened in sides]
        try:
            for number in range(count):
                events.phase(f"layer {number} of {count}")
                states = _advanced(sides, inputs, number, states, budget, events)
                after(sides, states, number)
            yield sides, states, budget
        finally:
            for file in states:
                file.close()


def sizes_of(sides: Sequence[Side], longest: int) -> Sizes:
    """Of the largest of the sides, in each respect."""
    found = []
    for side in sides:
        dims = side.stored.role_index.dims
        layer, parameter = side.model.layer_bytes()
        middle = dims.moe_intermediate_size if side.is_sparse else 0
        found.append((
            layer, parameter, side.model.config.hidden_size, middle, side.model.widest(), longest,
            len(sides),
        ))  # fmt: skip
    return Sizes(*(max(column) for column in zip(*found, strict=True)))


def _check_heads(sides: Sequence[Side]) -> None:
    """Raise, before hours of work, for heads that cannot be read or compared."""
    for side in sides:
        _ = side.model.shapes
    source = sides[0]
    for repo in sides[1:]:
        rows = [side.model.head.rows for side in (source, repo)]
        if rows[0] != rows[1]:
            raise RunError(
                f"{repo.name}: its head has {rows[1]} rows, and {rows[0]} in {source.name}: predictions "
                "over different vocabularies cannot be compared; evaluate hidden states alone "
                "(--first-layers N)"
            )


def _check_disk(folder: Path, tokens: int, sides: Sequence[Side]) -> None:
    # Of each model what goes into a layer and comes out of it; of one what its experts get and answer,
    # and routes of up to 16 experts a token.
    hidden = sides[0].model.config.hidden_size
    need = tokens * ((2 * len(sides) + 2) * 2 * hidden + 16 * 8) + (1 << 20)
    free = shutil.disk_usage(folder).free
    if need > free:
        raise RunError(
            f"hidden states of {tokens:,} tokens take {need >> 20} MiB, and {folder.parent} has "
            f"{free >> 20} MiB free; set TMPDIR to a larger disk, or give fewer --samples"
        )


def rows_file(opened: LoadedSide, name: str, rows: int, *, new: bool = True) -> InFile:
    """A file of `rows` tokens' hidden states in the folder of a side, or one that is there."""
    layers = opened.layers
    path = layers.folder / f"{name}.rows"
    return InFile(path, rows, layers.hidden, layers.model.dtype, layers.files, new=new)


def _embedded(opened: LoadedSide, jitter: bool, tokens: Sequence[Tokens]) -> InFile:
    """Return what goes into the first layer; with `jitter` its lowest bits are random."""
    import torch

    states = rows_file(opened, "hidden.0", opened.layers.total)
    chance = torch.Generator().manual_seed(0)
    at = 0
    for sample in tokens:
        found = opened.layers.model.embed(sample, opened.weights)
        if jitter:
            bits = torch.randint(0, 2, found.shape, generator=chance, dtype=torch.int16)
            found = (found.cpu().contiguous().view(torch.int16) ^ bits).view(torch.bfloat16)
        states.write(at, found)
        at += sample.size
    return states


def _advanced(
    sides: Sequence[LoadedSide], rounded: Sequence[StatedInputs | None], number: int,
    states: list[InFile], budget: Budget, events: Events,
) -> list[InFile]:  # fmt: skip
    """Return what goes into the next layer of each side."""
    together = [budget.experts(device) for device in sides[0].devices]
    found = []
    for opened, inputs, before in zip(sides, rounded, states, strict=True):
        following = rows_file(opened, f"hidden.{number + 1}", opened.layers.total)
        layer = opened.layers.model.layer(number, opened.weights, opened.layers.device)
        with nullcontext(opened) if inputs is None else as_stated(opened, layer, inputs) as side:
            stream = Stream(opened.layers.lengths, before, following)
            forward(side, layer, [stream], together=together, tell=events.wrote)
        del layer
        found.append(following)
    for before in states:
        before.close()
        before.path.unlink()
    trim()
    return found


def _chunks(count: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, CHUNK):
        yield start, min(start + CHUNK, count)


def _apart(
    sides: Sequence[LoadedSide], states: Sequence[InFile], number: int, lengths: Sequence[int]
) -> list[float]:
    """Mean errors of the hidden states of each side but the first, relative to the first's."""
    total = sum(lengths)
    off = [0.0] * (len(states) - 1)
    for start, stop in _chunks(total):
        source = states[0].read(start, stop)
        for place, file in enumerate(states[1:]):
            off[place] += distance(source, file.read(start, stop))
    if not all(map(isfinite, off)):
        broken = next(
            (
                opened.side.name
                for opened, file in zip(sides, states, strict=True)
                if any(not bool(file.read(a, b).isfinite().all()) for a, b in _chunks(total))
            ),
            None,
        )
        what = f"{broken}: hidden states after layer {number} are not finite" if broken else (
            f"{sides[0].side.name}: hidden states of a token are zero after layer {number}"
        )  # fmt: skip
        raise RunError(f"{what}; check the folder with qconvert validate --level full")
    return [one / total for one in off]


def _scores(
    sides: Sequence[LoadedSide], states: Sequence[InFile], tokens: Sequence[Tokens], budget: Budget
) -> list[Scores]:
    """Of each side but the first, of the tokens that are followed by one."""
    import torch

    finals = [finals_of(opened, file, tokens) for opened, file in zip(sides, states, strict=True)]
    targets = torch.cat([torch.from_numpy(sample[1:]) for sample in tokens])
    try:
        return scored(list(zip(sides, finals, strict=True)), targets, budget.tokens())
    finally:
        for file in finals:
            file.close()


def finals_of(
    opened: LoadedSide, states: Rows, tokens: Sequence[Tokens], name: str = "finals"
) -> InFile:
    """Return what goes into the head, of all tokens but the last of each sample."""
    layers = opened.layers
    finals = rows_file(opened, name, sum(sample.size - 1 for sample in tokens))
    at = start = 0
    for sample in tokens:
        rows = states.read(start, start + sample.size).to(layers.device)
        made = opened.side.model.finished(rows[None], opened.weights)[0, :-1]
        finals.write(at, made)
        at, start = at + sample.size - 1, start + sample.size
    return finals


# What the language models of all sides must have in common: sizes of what is compared.
_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")


def begun(
    devices: Sequence[str], notice: Callable[[str], None] | None
) -> tuple[list[str], Callable[[str], None]]:
    """Begin a run over models on some devices: returns its notes, empty, and what adds one and tells the
    user. Raises RunError for a device that is not there."""
    check_devices(devices)
    silence_transformers()
    notes: list[str] = []

    def remark(text: str) -> None:
        notes.append(text)
        if notice is not None:
            notice(text)

    return notes, remark


def evaluate(
    repos: Sequence[Checkpoint],
    source: Checkpoint,
    data: DataSpec,
    *,
    pair: Checkpoint | None = None,
    task: bool = False,
    activations: bool = False,
    layers: int | None = None,
    memory: int | None = None,
    devices: Sequence[str] = (),
    events: Events | None = None,
    notice: Callable[[str], None] | None = None,
) -> Evaluation:
    """Run a source and models made from it on the same samples. Returns the evaluation of the first
    repo, with those of the others beside it. `task`: the data are questions. `activations`: those of the
    repos are rounded as their configs state. `pair` holds the layers beside the CPU experts in
    `repos`, if those are not the source's. `layers`: only so many, and no logits. `memory` is in
    bytes (None: three quarters of the machine), `devices` are torch's names (none: all GPUs, else
    the CPU). `notice` is told what a user must know of the data.

    Raises UsageError for options that do not fit, CheckpointError for models that cannot be compared,
    PlanError for those that cannot be run and where torch or transformers is missing, DataError for the
    data, RunError for too little memory or disk."""
    what = "eval runs models as transformers computes them"
    require("calibrate", what, "torch", "transformers")
    of_cpu = ["amx" in (repo.manifest or {}) for repo in repos]
    if pair is not None and not any(of_cpu):
        raise UsageError(
            f"{repos[0].root}: --pair needs the folder of the CPU's experts, and this is not one; "
            "exchange the two, or omit --pair"
        )
    if "amx" in (source.manifest or {}):
        raise CheckpointError(
            f"{source.root}: holds CPU experts alone; name the checkpoint that they were made from"
        )
    rests = [(pair or source) if cpu else None for cpu in of_cpu]
    whole = [rest or repo for rest, repo in zip(rests, repos, strict=True)]
    for one in whole:
        _check_comparable(source, one)
    notes, remark = begun(devices, notice)
    told = digest(data, source.root)
    asked: Task | None = load_task(data, source.root) if task else None

    def load(folder: Path, told: Callable[[str], None]) -> Sequence[Tokens]:
        return load_task(data, folder).tokens if task else load_tokens(data, folder, told)

    tokens = load(source.root, remark) if asked is None else asked.tokens
    for one in whole:
        _check_tokenizers(tokens, data, source, one, load)
    if layers is None and max(sample.size for sample in tokens) < 2:
        raise DataError(
            f"{data.data}: no sample has 2 tokens, so none is predicted; give longer text, or evaluate "
            "hidden states alone (--first-layers N)"
        )
    theirs = side_of(source)
    ours = [side_of(repo, rest) for repo, rest in zip(repos, rests, strict=True)]
    for side in ours:
        _check_layers(layers, theirs, side)
    inputs = [StatedInputs(one) if activations else None for one in whole]

    errors = compare(
        (theirs, *ours), tokens, layers=layers, memory=memory,
        devices=tuple(dict.fromkeys(devices)) or found_devices(), events=events or NoEvents(),
        inputs=(None, *inputs),
    )  # fmt: skip
    if layers is not None:
        notes.append(
            f"the first {layers} of {theirs.model.layers} layers: no perplexity, no KL, no agreement"
        )
    notes.append(WEIGHTS_AND_ACTIVATIONS if activations else WEIGHTS_ONLY)
    for repo, stated, cpu in zip(repos, inputs, of_cpu, strict=True):
        if stated is not None and not cpu and not any(stated.found.values()):
            notes.append(NOTHING_ROUNDED.format(repo.name))
    units = [sample.size - 1 for sample in tokens] if asked is None else asked.units
    first, *others = (
        Evaluation(
            folder=repo.name, against=source.name, model=one.model_line,
            data="random tokens" if data.data is None else Path(data.data).name, digest=told,
            samples=len(tokens), length=data.length, seed=data.seed,
            tokens=sum(sample.size for sample in tokens), of_layers=theirs.model.layers,
            hidden=found.hidden, notes=tuple(notes), activations=activations,
            nbytes=0 if cpu else repo.nbytes, source_nbytes=0 if cpu else source.nbytes,
            logits=None if found.scores is None else logits_of(found.scores, units),
            task=result_of(asked, found.scores) if asked and found.scores else None,
            differences=differences_of(repos[0].name, errors[0].scores, found.scores, units, asked)
            if number and errors[0].scores and found.scores else None,
        )
        for number, (repo, one, cpu, found) in enumerate(
            zip(repos, whole, of_cpu, errors, strict=True)
        )
    )  # fmt: skip
    return replace(first, beside=tuple(others))


def _check_comparable(source: Checkpoint, repo: Checkpoint) -> None:
    """Raise CheckpointError for models whose hidden states or predictions have nothing in common."""
    kinds = [_kind(one) for one in (source, repo)]
    if kinds[0] != kinds[1]:
        raise CheckpointError(
            f"{repo.root}: is model_type {kinds[1]!r}, and {source.root} is {kinds[0]!r}: models of "
            "different architectures are not compared; name the checkpoint that it was made from"
        )
    for key in _SIZES:
        there, here = (text_config(one.config).get(key) for one in (source, repo))
        if there != here:
            raise CheckpointError(
                f"{repo.root}: config.json: {key} is {here!r}, and {there!r} in {source.root}: "
                "what they compute cannot be compared; name the checkpoint that it was made from"
            )


def _kind(checkpoint: Checkpoint) -> object:
    from qconvert.plan.plan import Plan

    return class_config(Plan.identity(checkpoint)).get("model_type")


def _check_tokenizers(
    tokens: Sequence[Tokens],
    data: DataSpec,
    source: Checkpoint,
    repo: Checkpoint,
    load: Callable[[Path, Callable[[str], None]], Sequence[Tokens]],
) -> None:
    """Raise DataError where the folder's own tokenizer makes other ids of the data. Where its files are
    the source's, or it has none, or the data are ids, nothing is to be compared."""
    if data.kind in ("tokens", "synthetic") or source.root == repo.root:
        return
    here, there = (
        {
            file.name: read_regular(file, MOST_TOKENIZER, error=DataError)
            for file in tokenizer_files(one.root)
        }
        for one in (repo, source)
    )
    if not here or here == there:
        return
    own = load(repo.root, lambda _: None)
    same = len(own) == len(tokens) and all(
        a.shape == b.shape and bool((a == b).all()) for a, b in zip(own, tokens, strict=True)
    )
    if not same:
        raise DataError(
            f"{repo.root}: its tokenizer makes other ids of {data.data} than that of {source.root}, so "
            "their predictions cannot be compared; copy the tokenizer's files from there"
        )


def _check_layers(layers: int | None, source: Side, repo: Side) -> None:
    if layers is not None and layers > source.model.layers:
        raise UsageError(
            f"--first-layers {layers}: {source.name} has {source.model.layers} layers; give at most "
            "that, or omit --first-layers for perplexity and KL as well"
        )
    if not source.model.layers or repo.model.layers != source.model.layers:
        raise CheckpointError(
            f"{repo.name}: has {repo.model.layers} decoder layers, and {source.name} "
            f"{source.model.layers}; name the checkpoint that it was made from"
        )
