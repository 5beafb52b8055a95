"""One decoder layer of one model over all samples: attention and router, then its experts, some at a
time, as calibration runs them, but that nothing is counted or solved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from qconvert.calibrate.experts import Expert, ExpertQuantizer, RoutedInputs
from qconvert.calibrate.memory import trim
from qconvert.calibrate.model import Layer
from qconvert.calibrate.rows import InFile, Rows, Scratch
from qconvert.calibrate.token_dispatch import dispatch_of
from qconvert.core.errors import PlanError
from qconvert.evaluate.side import Experts, Opened
from qconvert.models.experts import PROJECTIONS

# Tokens that the class's own experts answer too.
_CHECKED = 16

Tell = Callable[[int], None]


def forward(
    opened: Opened,
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
    scratch = Scratch(layers.folder, {}, layers.files)
    try:
        answers = scratch.rows("answers", layers.total, layers.hidden, torch.bfloat16)
        seen = layers.attend(layer, states, scratch)
        with torch.no_grad():
            _answer(opened, opened.experts, layer, seen, answers, together, tell)
            for batch, hidden, call in layers.through(number, states):
                answer = answers.read(batch.start, batch.stop).to(device)
                following.write(batch.start, layer.joined(hidden, call, answer).flatten(0, 1))
    finally:
        scratch.close()
    del layer, seen
    trim()


def _answer(
    opened: Opened,
    experts: Experts,
    layer: Layer,
    seen: RoutedInputs,
    answers: Rows,
    together: Sequence[int],
    tell: Tell,
) -> None:
    """Return what every expert answers to its tokens, added up in the order of their numbers."""
    layers = opened.layers
    benches = [
        ExpertQuantizer(
            device, layer, layer.middle(device), (), layers.settings, layers.reader, layers.clock
        )
        for device in opened.devices
    ]
    used = [number for number, tokens in enumerate(seen.counts) if tokens]
    at = told = 0
    while at < len(used):
        first, groups = at == 0, []
        for bench, most in zip(benches, together, strict=True):
            mine = used[at : at + most]
            groups.append(list(_read(experts, layer.number, mine, bench.device)))
            at += len(mine)
        if first:
            _check(layer, benches[0], groups[0][0], seen)
        for start, stop in seen.chunks:
            rows = answers.read(start, stop)
            for bench, group in zip(benches, groups, strict=True):
                with bench.clock("forward", bench.device) as tick:
                    routes, weights, inputs, rows = (
                        one.to(bench.device)
                        for one in (
                            seen.experts.read(start, stop),
                            seen.weights.read(start, stop),
                            seen.inputs.read(start, stop),
                            rows,
                        )
                    )
                    bench.answer(
                        group, rows, inputs, dispatch_of(routes, weights, len(seen.counts)), tick
                    )
            answers.write(start, rows)
        done = len(layers.lengths) * at // len(used)
        tell(done - told)
        told = done
        del groups
        trim()


def _check(layer: Layer, bench: ExpertQuantizer, expert: Expert, seen: RoutedInputs) -> None:
    """That the class's own experts answer what is computed here. Hidden states that are not finite are
    found after the layer."""
    import torch

    linear = torch.nn.functional.linear
    rows = seen.inputs.read(0, min(_CHECKED, seen.chunks[0][1])).to(bench.device)
    if not bool(rows.isfinite().all()):
        return
    made = linear(bench.middle(linear(rows, expert.gate_up)), expert.down)
    layer.check(made, rows, expert.gate_up, expert.down)


def _read(experts: Experts, layer: int, numbers: Sequence[int], device: str) -> Iterator[Expert]:
    import torch

    for number in numbers:
        gate, up, down = (experts.matrix(layer, number, kind).to(device) for kind in PROJECTIONS)
        yield Expert(number, torch.cat([gate, up]), down, False, {})
