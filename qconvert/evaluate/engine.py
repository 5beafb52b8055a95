"""Two models on the same tokens, a decoder layer of each in turn.

Hidden states of both lie in files, BF16, as in a calibration; what is compared after a layer are the two
files. What is in memory at a time is one layer of one model, and some of its experts; at the end a slice
of both heads.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from qconvert.calibrate.activation_store import InFile, ScratchRows, TokenRows
from qconvert.calibrate.experts import Expert, ExpertQuantizer, RoutedInputs
from qconvert.calibrate.memory import keep_nothing_freed, trim
from qconvert.calibrate.model import Layer
from qconvert.calibrate.token_dispatch import dispatch_of
from qconvert.core.errors import PlanError, RunError
from qconvert.evaluate.head import scored
from qconvert.evaluate.memory import CHUNK, Budget, Sizes
from qconvert.evaluate.result import Logits, distance, logits_of
from qconvert.evaluate.side import Experts, LoadedSide, Side
from qconvert.models.experts import PROJECTIONS
from qconvert.run.work.events import Events

if TYPE_CHECKING:
    import numpy as np

    Tokens = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


# One decoder layer of one model over all samples: attention and router, then its experts, some at a
# time, as calibration runs them, but that nothing is counted or solved.

# Tokens that the class's own experts answer too.
_CHECKED = 16

Tell = Callable[[int], None]


def forward(
    opened: LoadedSide,
    number: int,
    states: InFile,
    following: InFile,
    *,
    together: Sequence[int],
    tell: Tell,
) -> None:
    """Compute `following`, what goes into the next layer, of `states`, what goes into this one.
    `together` is how many experts each device has at a time; `tell` is called with samples as they are
    done."""
    import torch

    layers = opened.layers
    device = layers.device
    layer = layers.model.layer(number, opened.weights, device)
    if not layer.sparse:
        for batch, hidden, call in layers.through(number, states):
            following.write(batch.start, layer.forward(hidden, call).flatten(0, 1))
            tell(batch.count)
        return
    if opened.experts is None:
        raise PlanError(
            f"layer {number}: {type(layer.module).__name__} has routed experts, and the checkpoint none "
            "there; evaluate the model as it was published"
        )
    scratch = ScratchRows(layers.folder, {}, layers.files)
    try:
        answers = scratch.rows("answers", layers.total, layers.hidden, torch.bfloat16)
        routed = layers.attend(layer, states, scratch)
        with torch.no_grad():
            _answer(opened, opened.experts, layer, routed, answers, together, tell)
            for batch, hidden, call in layers.through(number, states):
                answer = answers.read(batch.start, batch.stop).to(device)
                following.write(batch.start, layer.joined(hidden, call, answer).flatten(0, 1))
    finally:
        scratch.close()
    del layer, routed
    trim()


def _answer(
    opened: LoadedSide,
    experts: Experts,
    layer: Layer,
    routed: RoutedInputs,
    answers: TokenRows,
    together: Sequence[int],
    tell: Tell,
) -> None:
    """Return what every expert answers to its tokens, added up in the order of their numbers."""
    layers = opened.layers
    quantizers = [
        ExpertQuantizer(
            device, layer, layer.middle(device), (), layers.settings, layers.reader, layers.clock
        )
        for device in opened.devices
    ]
    used = [number for number, tokens in enumerate(routed.counts) if tokens]
    at = told = 0
    while at < len(used):
        first, groups = at == 0, []
        for quantizer, most in zip(quantizers, together, strict=True):
            mine = used[at : at + most]
            groups.append(list(_read(experts, layer.number, mine, quantizer.device)))
            at += len(mine)
        if first:
            _check(layer, quantizers[0], groups[0][0], routed)
        for start, stop in routed.chunks:
            rows = answers.read(start, stop)
            for quantizer, group in zip(quantizers, groups, strict=True):
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
                    quantizer.answer(
                        group, rows, inputs, dispatch_of(routes, weights, len(routed.counts)), tick
                    )
            answers.write(start, rows)
        done = len(layers.lengths) * at // len(used)
        tell(done - told)
        told = done
        del groups
        trim()


def _check(layer: Layer, quantizer: ExpertQuantizer, expert: Expert, routed: RoutedInputs) -> None:
    """That the class's own experts answer what is computed here. Hidden states that are not finite are
    found after the layer."""
    import torch

    linear = torch.nn.functional.linear
    rows = routed.inputs.read(0, min(_CHECKED, routed.chunks[0][1])).to(quantizer.device)
    if not bool(rows.isfinite().all()):
        return
    made = linear(quantizer.middle(linear(rows, expert.gate_up)), expert.down)
    layer.check(made, rows, expert.gate_up, expert.down)


def _read(experts: Experts, layer: int, numbers: Sequence[int], device: str) -> Iterator[Expert]:
    import torch

    for number in numbers:
        gate, up, down = (experts.matrix(layer, number, kind).to(device) for kind in PROJECTIONS)
        yield Expert(number, torch.cat([gate, up]), down, False, {})


@dataclass(frozen=True)
class LayerErrors:
    """Relative errors of hidden states by layer, and of logits, None where not all layers were run."""

    hidden: tuple[float, ...]
    logits: Logits | None


def compare(
    source: Side,
    repo: Side,
    tokens: Sequence[Tokens],
    *,
    layers: int | None,
    memory: int | None,
    devices: Sequence[str],
    events: Events,
) -> LayerErrors:
    """Run samples of token ids, each int64 [length], through the first `layers` of both models (None:
    all, and the head) on devices of torch, the first of which does all but experts.

    Raises RunError where `memory`, in bytes, or the disk of TMPDIR is too small, before anything is run,
    and for hidden states that are not finite; PlanError for models that cannot be run.
    """
    keep_nothing_freed()
    lengths = [sample.size for sample in tokens]
    count = source.model.layers if layers is None else layers
    if layers is None:
        _check_heads(source, repo)
    budget = Budget.of(memory, _sizes(source, repo, max(lengths)))
    with tempfile.TemporaryDirectory(prefix="qconvert-eval-") as where, ExitStack() as stack:
        _check_disk(Path(where), sum(lengths), source.model.config.hidden_size)
        sides = []
        for name, side in (("source", source), ("repo", repo)):
            folder = Path(where) / name
            folder.mkdir()
            sides.append(stack.enter_context(side.opened(lengths, folder, devices)))
        events.start(2 * count * len(lengths), 0)
        states = [_embedded(opened, tokens) for opened in sides]
        try:
            hidden = []
            for number in range(count):
                events.phase(f"layer {number} of {count}")
                states = _advanced(sides, number, states, budget, events)
                hidden.append(_apart(sides, states, number, lengths))
            logits = None
            if layers is None:
                events.phase("logits")
                logits = _logits(sides, states, tokens, budget)
        finally:
            for file in states:
                file.close()
    return LayerErrors(tuple(hidden), logits)


def _sizes(source: Side, repo: Side, longest: int) -> Sizes:
    """Of the larger of both sides, in each respect."""
    found = []
    for side in (source, repo):
        dims = side.stored.role_index.dims
        layer, parameter = side.model.layer_bytes()
        middle = dims.moe_intermediate_size if side.is_sparse else 0
        found.append(
            (layer, parameter, side.model.config.hidden_size, middle, side.model.widest(), longest)
        )
    return Sizes(*(max(column) for column in zip(*found, strict=True)))


def _check_heads(source: Side, repo: Side) -> None:
    """Raise, before hours of work, for heads that cannot be read or compared."""
    for side in (source, repo):
        _ = side.model.shapes
    rows = [side.model.head.rows for side in (source, repo)]
    if rows[0] != rows[1]:
        raise RunError(
            f"{repo.name}: its head has {rows[1]} rows, and {rows[0]} in {source.name}: predictions "
            "over different vocabularies cannot be compared; evaluate hidden states alone "
            "(--first-layers N)"
        )


def _check_disk(folder: Path, tokens: int, hidden: int) -> None:
    # Of both models what goes into a layer and comes out of it; of one what its experts get and answer,
    # and routes of up to 16 experts a token.
    need = tokens * (6 * 2 * hidden + 16 * 8) + (1 << 20)
    free = shutil.disk_usage(folder).free
    if need > free:
        raise RunError(
            f"hidden states of {tokens:,} tokens take {need >> 20} MiB, and {folder.parent} has "
            f"{free >> 20} MiB free; set TMPDIR to a larger disk, or give fewer --samples"
        )


def _file(opened: LoadedSide, name: str, rows: int) -> InFile:
    import torch

    layers = opened.layers
    path = layers.folder / f"{name}.rows"
    return InFile(path, rows, layers.hidden, torch.bfloat16, layers.files, new=True)


def _embedded(opened: LoadedSide, tokens: Sequence[Tokens]) -> InFile:
    """Return what goes into the first layer."""
    states = _file(opened, "hidden.0", opened.layers.total)
    at = 0
    for sample in tokens:
        states.write(at, opened.layers.model.embed(sample, opened.weights))
        at += sample.size
    return states


def _advanced(
    sides: Sequence[LoadedSide], number: int, states: list[InFile], budget: Budget, events: Events
) -> list[InFile]:
    """Return what goes into the next layer of each side."""
    together = [budget.experts(device) for device in sides[0].devices]
    found = []
    for opened, before in zip(sides, states, strict=True):
        following = _file(opened, f"hidden.{number + 1}", opened.layers.total)
        forward(opened, number, before, following, together=together, tell=events.wrote)
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
) -> float:
    total = sum(lengths)
    off = sum(
        distance(states[0].read(start, stop), states[1].read(start, stop))
        for start, stop in _chunks(total)
    )
    if not isfinite(off):
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
    return off / total


def _logits(
    sides: Sequence[LoadedSide], states: Sequence[InFile], tokens: Sequence[Tokens], budget: Budget
) -> Logits:
    """Of the tokens that are followed by one."""
    import torch

    predicting = [sample.size - 1 for sample in tokens]
    finals = [_finals(opened, file, tokens) for opened, file in zip(sides, states, strict=True)]
    targets = torch.cat([torch.from_numpy(sample[1:]) for sample in tokens])
    try:
        scores = scored((sides[0], finals[0]), (sides[1], finals[1]), targets, budget.tokens())
    finally:
        for file in finals:
            file.close()
    return logits_of(scores, predicting)


def _finals(opened: LoadedSide, states: InFile, tokens: Sequence[Tokens]) -> InFile:
    """Return what goes into the head, of all tokens but the last of each sample."""
    layers = opened.layers
    finals = _file(opened, "finals", sum(sample.size - 1 for sample in tokens))
    at = start = 0
    for sample in tokens:
        rows = states.read(start, start + sample.size).to(layers.device)
        made = opened.side.model.finished(rows[None], opened.weights)[0, :-1]
        finals.write(at, made)
        at, start = at + sample.size - 1, start + sample.size
    return finals
