"""A running server asked for the log-probabilities of next tokens, and compared with the folder's own.

The server computes a few texts and goes on with each greedily; the folder's model then runs on the same
ids, as `eval` runs it: BF16, weights decoded, a decoder layer in memory at a time. What differs is not
the weights': the order of sums, activations or a KV cache that the runtime quantizes, and errors.

How far that alone leads is measured in the same run: the model runs a second time with the lowest bits
of its first hidden states drawn at random, and activations rounded where the folder's config has
runtimes quantize them. Compared is the divergence that nine of ten places do not exceed: where a router
takes another expert it is a hundred times the median, and that is no error. Of four small models the
same weights computed in float32 are 0.4 to 0.9 times as far away as the second run, and W4A16 of them 26
to 1,400 times; four times is right. vLLM's HTTP server on an H200 was 0.6 to 1.5 times as far away for
eleven folders of a small MoE. A KV cache that the config has in FP8 is not computed: 0.1 nats are added,
where vLLM's lost 0.06.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

from qconvert.calibrate.devices import found_devices
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.client.served import Answer, Predicted, Server
from qconvert.core.errors import CheckpointError, RunError, UsageError
from qconvert.core.extras import require
from qconvert.core.shown import count
from qconvert.evaluate.activations import BITS, Inputs, StatedInputs
from qconvert.evaluate.engine import begun, finals_of, last_states
from qconvert.evaluate.head import predicted
from qconvert.evaluate.side import side_of
from qconvert.run.work.events import Events, NoEvents
from qconvert.runtimes.advisories import advisories
from qconvert.runtimes.consumers import Consumer
from qconvert.samples.data import load_tokens
from qconvert.samples.request import DataSpec
from qconvert.samples.tokenizer import Tokenizer
from qconvert.validation.runner import KV_STATED

if TYPE_CHECKING:
    import numpy as np
    import torch

    Tokens = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

# Texts of several kinds, so that other experts, and other languages' tokens, have a part.
QUESTIONS = (
    "The capital of France is Paris, the capital of Italy is Rome, and the capital of Japan is",
    "Water boils at 100 degrees Celsius at sea level. On a mountain air is thinner, so it boils at a",
    "def mean(numbers):\n    total = 0\n    for number in numbers:\n        total += number\n    return",
    "Question: A train leaves at 9:40 and arrives at 11:05. How long does it take?\nAnswer: It takes",
    "Der Mond dreht sich um die Erde, und die Erde dreht sich um die",
    '{"name": "Ada Lovelace", "born": 1815, "occupation": "mathematician", "known for":',
)
NEW = 16  # tokens that the server adds to each text: as decoding computes them, not prefill
# Nats, in the median. More is garbage: half of the tokens have a third of their probability or less.
GARBAGE = 1.0
_LEAST, _TENTHS = 0.001, 0.9
_OF_CACHE = 0.1  # nats that a KV cache in FP8 may lose
_TIMES_NOISE = 4.0

Verdict = Literal["right", "more error", "garbage"]


@dataclass(frozen=True)
class Distance:
    """Distance of a server from the folder's weights, over `tokens` predictions. `kl` is the mean
    KL(REPO || server) in nats over the ids that the server names and all others together, which is no
    more than over all; `median` and `high`, which nine of ten places do not exceed, are of the same.
    `noise` is `high` of two runs that differ by rounding alone, of activations too, `limit` the most
    that it explains; `agreement` the part of places at which both prefer the same token."""

    tokens: int
    kl: float
    median: float
    high: float
    noise: float
    limit: float
    agreement: float

    @property
    def verdict(self) -> Verdict:
        """Return `garbage` for numbers that are none, too."""
        if not isfinite(self.kl) or self.median > GARBAGE:
            return "garbage"
        return "right" if self.high <= self.limit else "more error"


@dataclass(frozen=True)
class Asked:
    """Answers of a server (`runtime`, `version` if it says one, under the `name` of its model) to
    `questions`, compared with `folder`: of the texts that it was given (`prefill`), and of the tokens
    that it added (`decode`). `causes` are what may be the reason of an error."""

    folder: str
    server: str
    runtime: str
    version: str | None
    name: str
    questions: int
    prefill: Distance
    decode: Distance
    causes: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The worse of both."""
        order: tuple[Verdict, ...] = ("right", "more error", "garbage")
        return max(self.prefill.verdict, self.decode.verdict, key=order.index)

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        found = {**asdict(self), "verdict": self.verdict}
        return {**found, "causes": list(self.causes), "notes": list(self.notes)}


def ask_server(
    repo: Checkpoint,
    url: str,
    data: DataSpec | None = None,
    *,
    pair: Checkpoint | None = None,
    memory: int | None = None,
    devices: Sequence[str] = (),
    events: Events | None = None,
    notice: Callable[[str], None] | None = None,
) -> Asked:
    """Ask a server that serves `repo`. `data`: other texts than QUESTIONS; `pair` holds the layers
    beside the CPU experts in `repo`. `memory` and `devices` are those of `evaluate`.

    Raises RunError where no server answers or another one, and for too little memory or disk,
    CheckpointError for a folder that is not the served model's, UsageError, PlanError and DataError as
    `evaluate` does.
    """
    require("calibrate", "ask runs the model as transformers computes it", "torch", "transformers")
    if ("amx" in (repo.manifest or {})) != (pair is not None):
        raise UsageError(
            f"{repo.root}: holds the CPU's experts alone; name the folder of the GPU side (--pair)"
            if pair is None
            else f"{repo.root}: is no folder of the CPU's experts; omit --pair"
        )
    notes, remark = begun(devices, notice)
    rest = pair or repo
    server = Server.at(url)
    texts = _texts(data, rest, remark)
    sides = (side_of(repo, pair), side_of(repo, pair))  # what one holds of its layers is its own
    rows = sides[0].model.head.rows
    answers = []
    for text in texts:
        answers.append(server.ask(text.tolist(), NEW))
        _check_ids(server, answers[-1], rows)
    ran = [_with_new(*each) for each in zip(texts, answers, strict=True)]
    inputs = StatedInputs(rest)
    own, shaken = _own_answers(
        sides, inputs, ran, _ids(answers), memory, tuple(dict.fromkeys(devices)) or found_devices(),
        events or NoEvents(),
    )  # fmt: skip
    allowed = _OF_CACHE if states_cache(rest) else 0.0
    prefill, decode = (
        distance(part, own, shaken, where, allowed) for part, where in _parts(answers)
    )
    found = Asked(
        repo.name, server.url, server.runtime, server.version, server.model, len(texts), prefill, decode,
        (), tuple(notes),
    )  # fmt: skip
    return found if found.verdict == "right" else _explained(found, rest, inputs.found.values())


def _texts(data: DataSpec | None, repo: Checkpoint, remark: Callable[[str], None]) -> list[Tokens]:
    """The ids of each text, at least two, int64."""
    import numpy as np

    if data is not None:
        found = load_tokens(data, repo.root, remark)
    else:
        tokenizer = Tokenizer(repo.root)
        found = [np.array(tokenizer.text(text), np.int64) for text in QUESTIONS]
    kept = [ids for ids in found if ids.size > 1]
    if not kept:
        raise UsageError(
            "expected texts of at least 2 tokens, found none; give longer ones (--data)"
        )
    return kept


def _check_ids(server: Server, answer: Answer, rows: int) -> None:
    """Raise CheckpointError where a server names tokens that the folder's head has not."""
    most = max(max(one.logprobs) for one in (*answer.prompt, *answer.new))
    if most >= rows:
        raise CheckpointError(
            f"{server.url}: serves {server.model!r}, which has a token {most}, and the folder's head "
            f"has {rows} rows; name the folder that is served"
        )


def _with_new(text: Tokens, answer: Answer) -> Tokens:
    import numpy as np

    return np.concatenate([text, np.array([one.token for one in answer.new], np.int64)])


def _ids(answers: Sequence[Answer]) -> list[Predicted]:
    """Predictions in the order of the ids that are run."""
    return [one for answer in answers for one in (*answer.prompt, *answer.new)]


def _parts(answers: Sequence[Answer]) -> list[tuple[list[Predicted], list[int]]]:
    """Predictions of prompts and of new tokens, with their places among all."""
    found: list[tuple[list[Predicted], list[int]]] = [([], []), ([], [])]
    at = 0
    for answer in answers:
        for (kept, places), part in zip(found, (answer.prompt, answer.new), strict=True):
            kept += part
            places += range(at, at + len(part))
            at += len(part)
    return found


# Log-probabilities of one run, as `predicted` gives them: of ids [P, K], and the id preferred [P] with
# its own [P].
Own = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]


def _own_answers(
    sides: Sequence[Any],
    inputs: StatedInputs,
    texts: Sequence[Tokens],
    wanted: Sequence[Predicted],
    memory: int | None,
    devices: Sequence[str],
    events: Events,
) -> list[Own]:
    """The folder's log-probabilities of the ids that the server named, padded with -1, of a plain run
    and of one whose first hidden states are shaken, and whose activations are rounded."""
    import torch

    for side in sides:
        _ = side.model.shapes  # raises before hours of work
    width = max(len(one.logprobs) for one in wanted)
    ids = torch.full((len(wanted), width), -1, dtype=torch.int64)
    for row, one in enumerate(wanted):
        ids[row, : len(one.logprobs)] = torch.tensor(list(one.logprobs))
    with last_states(
        sides, texts, count=sides[0].model.layers, memory=memory, devices=devices, events=events,
        after=_check_finite, inputs=(None, inputs), jitter=True,
    ) as (opened, states, budget):  # fmt: skip
        events.phase("logits")
        finals = [finals_of(side, file, texts) for side, file in zip(opened, states, strict=True)]
        try:
            return predicted(list(zip(opened, finals, strict=True)), ids, budget.tokens())
        finally:
            for file in finals:
                file.close()


def _check_finite(sides: Sequence[Any], states: Sequence[Any], number: int) -> None:
    rows = states[0].read(0, sides[0].layers.total)
    if not bool(rows.isfinite().all()):
        raise RunError(
            f"{sides[0].side.name}: hidden states after layer {number} are not finite; check the folder "
            "with qconvert validate --level full"
        )


def distance(
    server: Sequence[Predicted], own: Own, shaken: Own, places: Sequence[int], allowed: float
) -> Distance:
    """Compare a server's predictions with the folder's at `places` of its own; `allowed` is what may be
    lost beside the weights and not by rounding, in nats."""
    import torch

    at = torch.tensor(places)
    width = own[0].shape[1]
    theirs = torch.full((len(server), width), -torch.inf, dtype=torch.float64)
    for row, one in enumerate(server):
        theirs[row, : len(one.logprobs)] = torch.tensor(
            list(one.logprobs.values()), dtype=torch.float64
        )
    named = theirs != -torch.inf
    preferred = own[1][at]
    outside = [int(id) not in one.logprobs for id, one in zip(preferred, server, strict=True)]
    first = torch.where(torch.tensor(outside), own[2][at], -torch.inf)
    least = torch.tensor([_least(one) for one in server], dtype=torch.float64)
    kl = divergence(own[0][at], theirs, named, first, least)
    noise = float(divergence(own[0][at], shaken[0][at], named).quantile(_TENTHS))
    best = torch.tensor([max(one.logprobs, key=one.logprobs.__getitem__) for one in server])
    limit = max(_LEAST + allowed, _TIMES_NOISE * noise)
    same = float((best == preferred).double().mean())
    high = float(kl.quantile(_TENTHS))
    return Distance(len(server), float(kl.mean()), float(kl.median()), high, noise, limit, same)


def _least(one: Predicted) -> float:
    """Log-probability that no id which the server does not name exceeds: that of the last of the
    likeliest. The token that stands there may be less likely."""
    return min((value for id, value in one.logprobs.items() if id != one.token), default=0.0)


def divergence(
    p: torch.Tensor,
    q: torch.Tensor,
    named: torch.Tensor,
    first: torch.Tensor | None = None,
    least: torch.Tensor | None = None,
) -> torch.Tensor:
    """KL(P || Q) in nats [T] of log-probabilities float64 [T, K], where `named` bool [T, K], and of all
    other ids as one: no more than the divergence over the whole vocabulary. With `first` [T], P's
    likeliest id is one more where it is not named (-inf where it is), to which Q gives `least` [T] at
    most: without it, a Q that is flat would be near any P."""
    import torch

    a, b = (torch.where(named, one, -torch.inf).exp() for one in (p, q))
    inside = torch.where(named, a * (p - q), 0.0).sum(1)
    left, right = ((1 - one.sum(1)).clamp(min=1e-12) for one in (a, b))
    if first is not None and least is not None:
        mine = first.exp()
        theirs = torch.minimum(least.exp(), right * mine / left)  # what is nearest to P
        inside = inside + torch.where(mine > 0, mine * (mine / theirs).log(), 0.0)
        left, right = ((one - its).clamp(min=1e-12) for one, its in ((left, mine), (right, theirs)))
    return inside + left * (left / right).log()


def states_cache(checkpoint: Checkpoint) -> bool:
    """Tell whether a folder's config has runtimes keep a KV cache in FP8."""
    return any(one.block.get(key) for one in checkpoint.quantization_configs for key in KV_STATED)


def _explained(found: Asked, repo: Checkpoint, inputs: Iterable[Inputs | None]) -> Asked:
    """The same with what may be the reason."""
    causes = [
        f"{row.runtime}: {f'with {row.setting}: ' if row.setting else ''}{row.what} ({row.source})"
        for row in advisories(Consumer(found.runtime, found.version), repo.config)
    ]
    if found.prefill.verdict == "right":
        causes.append(
            "texts are right and added tokens are not: kernels of decoding, a KV cache in FP8 "
            "(--kv-cache-dtype), or a draft"
        )
    if found.verdict == "more error" and not states_cache(repo):
        causes.append(
            "the server's options: a KV cache in FP8 (--kv-cache-dtype) rounds what the folder does not"
        )
    bits = min((BITS[one[0]] for one in inputs if one is not None), default=None)
    if bits is not None and found.verdict == "more error":
        causes.append(
            f"the format quantizes activations to {bits} bits: compare with a server of the source"
        )
    of = f"{found.runtime}=={found.version}" if found.version else found.runtime
    causes.append(
        f"the folder: `qconvert validate {found.folder} --for {of} --tp N --level full` says what its "
        "loader reads otherwise than it is stored"
    )
    return replace(found, causes=tuple(causes))


def summary(found: Asked) -> str:
    """The verdict as a sentence."""
    return {
        "right": "served right: as its weights are",
        "more error": "served with more error than its weights explain",
        "garbage": "garbage: what is served are not these weights",
    }[found.verdict] + f" ({count(found.questions, 'text')})"
