"""Result of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, sqrt
from typing import TYPE_CHECKING, Any

from qconvert.checkpoint.checkpoint import MANIFEST, RECEIPT, WORK_DIR, Checkpoint
from qconvert.checkpoint.receipt import sealed_manifest
from qconvert.core.errors import OutputError
from qconvert.core.manifest_keys import EVALUATION
from qconvert.core.shown import count
from qconvert.hub.card import README, with_evaluation
from qconvert.repair.repair import Change, errors_with
from qconvert.repair.sealed import hash_of, receipt_with
from qconvert.repair.write import finish, write

if TYPE_CHECKING:
    import torch

    from qconvert.evaluate.head import Scores
    from qconvert.evaluate.paired import Differences
    from qconvert.evaluate.task import TaskResult


# What weights alone were changed says nothing of what a runtime rounds beside them.
WEIGHTS_ONLY = (
    "weights alone: both models compute in BF16, as transformers does; a runtime that quantizes "
    "activations or the KV cache loses more"
)
WEIGHTS_AND_ACTIVATIONS = (
    "activations are rounded as each folder's config states, with a scale for each token or its blocks; "
    "the KV cache is not, and the source computes in BF16"
)
NOTHING_ROUNDED = "{}: found no quantized activations in its config, so none were rounded"


@dataclass(frozen=True)
class Logits:
    """Distance of predictions, over `predicted` tokens. `perplexity` is the folder's,
    `source_perplexity` the source's; `kl` the mean of KL(SRC || REPO) in nats a token, `kl_error` its
    standard error over samples, or questions (None: there is one alone); `agreement` the part of tokens
    after which both prefer the same one."""

    predicted: int
    perplexity: float
    source_perplexity: float
    kl: float
    kl_error: float | None
    agreement: float


@dataclass(frozen=True)
class Evaluation:
    """Quality lost by a conversion. `folder` and `against` are the places of both models, as they
    were named, `model` says what they are. `data` is the data's name without its folder, `digest` a hash
    of its content, tokenizer and choice; `samples` of at most `length` tokens were drawn by `seed`,
    `tokens` in all. `task` are answers to the questions that these were, None where there were none.

    `hidden` are relative errors of the hidden states after each layer that was run: the norm of the
    difference over the source's norm, the mean over tokens. `logits` are None where not all `of_layers`
    layers were run.

    `nbytes` are those of the folder's tensors, `source_nbytes` of the source's (0: not known, as of a
    folder of CPU experts alone). `activations`: the folder's were rounded as its config has runtimes do.
    `beside` are those of other folders, in the same run, each with its `differences` from this one (None
    where there are no logits)."""

    folder: str
    against: str
    model: str
    data: str
    digest: str
    samples: int
    length: int
    seed: int
    tokens: int
    of_layers: int
    hidden: tuple[float, ...]
    logits: Logits | None
    notes: tuple[str, ...] = ()
    activations: bool = False
    task: TaskResult | None = None
    differences: Differences | None = None
    beside: tuple[Evaluation, ...] = ()
    nbytes: int = 0
    source_nbytes: int = 0

    @property
    def layers(self) -> int:
        """Return how many layers were run."""
        return len(self.hidden)

    @property
    def smaller(self) -> float | None:
        """Return how many times smaller the folder is than the source."""
        return self.source_nbytes / self.nbytes if self.nbytes else None

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        found = {**asdict(replace(self, beside=())), "layers": self.layers}
        return {
            **found, "hidden": list(self.hidden), "notes": list(self.notes),
            "differences": None if self.differences is None else self.differences.as_object(),
            "beside": [one.as_object() for one in self.beside],
        }  # fmt: skip

    def fact(self) -> dict[str, Any]:
        """Return what a manifest keeps: no place on a disk, and nothing of another folder."""
        left = ("folder", "against", "model", "notes", "differences", "beside", "nbytes",
                "source_nbytes",
                *(["task"] if self.task is None else []),
                *(["activations"] if not self.activations else []))  # fmt: skip
        return {key: value for key, value in self.as_object().items() if key not in left}


def logits_of(scores: Scores, units: Sequence[int]) -> Logits:
    """Of the scores of units, samples or questions, that predict so many tokens each, in order."""
    return Logits(
        int(scores.kl.shape[0]),
        _perplexity(scores.repo),
        _perplexity(scores.source),
        float(scores.kl.mean()),
        standard_error(sums_of(scores.kl, units), units),
        float(scores.agree.double().mean()),
    )


def _perplexity(losses: torch.Tensor) -> float:
    """Of a broken model at most e^700: what is more is no float64."""
    return exp(min(700.0, float(losses.mean())))


def sums_of(values: torch.Tensor, units: Sequence[int]) -> list[float]:
    """Over the tokens of each unit, which has so many, of values [P] of all."""
    sums, at = [], 0
    for tokens in units:
        sums.append(float(values[at : at + tokens].sum()))
        at += tokens
    return sums


def standard_error(sums: Sequence[float], lengths: Sequence[int]) -> float | None:
    """Of the mean over tokens, given sums over units of so many (None: there is one): tokens of a sample
    are not independent, samples are (a ratio estimate: Cochran, Sampling Techniques, 6.4)."""
    count, tokens = len(sums), sum(lengths)
    if count < 2:
        return None
    mean = sum(sums) / tokens
    spread = sum((total - mean * length) ** 2 for total, length in zip(sums, lengths, strict=True))
    return sqrt(spread * count / (count - 1)) / tokens


def distance(source: torch.Tensor, repo: torch.Tensor) -> float:
    """The sum over tokens of the relative error of hidden states [T, H]; not finite where one is not."""
    a, b = source.double(), repo.double()
    off, size = (b - a).norm(dim=1), a.norm(dim=1)
    # A token of zeros in both is no error.
    return float((off / size).where(off != 0, off).sum())


# Result of an evaluation, written into the folder that it is about: manifest, model card, receipt. All
# three are replaced together, as a repair replaces files: an interrupted one is finished by the next,
# or leaves no trace. The same conversion, run again, takes the folder for its own result as before.

_WHY = ("records an evaluation",)


def check_recordable(checkpoint: Checkpoint) -> None:
    """Raise OutputError, before hours of work, for a folder that nothing can be written into. What an
    interrupted repair or evaluation replaced in part must have been carried to its end (`finish`)."""
    root = checkpoint.root
    if (root / WORK_DIR).is_dir():
        raise OutputError(
            f"{root}: {WORK_DIR}/ exists: a conversion is unfinished; run its command again, or "
            "qconvert clean"
        )
    if not (root / MANIFEST).is_file():
        raise OutputError(
            f"{root}: has no {MANIFEST}, so qconvert did not make it and nothing can be noted there; "
            "omit --write"
        )
    links = [name for name in (MANIFEST, RECEIPT, README) if (root / name).is_symlink()]
    if links:
        raise OutputError(
            f"{root / links[0]}: is a link (a Hub cache, or a copy by links), and is not written to; "
            "evaluate a folder of its own, or omit --write"
        )
    _check_sound(checkpoint, ())


def record(checkpoint: Checkpoint, found: Evaluation) -> tuple[str, ...]:
    """Note an evaluation of a whole model in its folder's manifest, in place of an earlier one, and on
    its card, if it has one. Returns the names of the files that were written.

    Raises OutputError as `check_recordable` does, CheckpointError for a receipt that does not match its
    seal or a card whose front matter cannot be read.
    """
    assert found.logits is not None, "some layers alone were run"
    finish(checkpoint.root)
    check_recordable(checkpoint)
    before, manifest = checkpoint.manifest_bytes, checkpoint.manifest
    assert manifest is not None
    kept = {key: value for key, value in manifest.items() if key not in ("seal", EVALUATION)}
    noted = {**kept, EVALUATION: found.fact()}
    after = {MANIFEST: (before, sealed_manifest(noted))}
    readme = checkpoint.read(README)
    if readme is not None:
        text = with_evaluation(noted, checkpoint.config, readme.decode("utf-8", "replace"))
        after[README] = (readme, text.encode())
    receipt = checkpoint.read(RECEIPT, checkpoint.receipt_limit)
    if receipt is not None:
        changed = {name: (hash_of(old), new) for name, (old, new) in after.items()}
        after[RECEIPT] = (receipt, receipt_with(receipt, checkpoint, changed))
    changes = [
        Change(name, old, new, _WHY) for name, (old, new) in sorted(after.items()) if old != new
    ]
    if changes:
        _check_sound(checkpoint, changes)
        write(checkpoint.root, changes)
    return tuple(change.file for change in changes)


def _check_sound(checkpoint: Checkpoint, changes: Sequence[Change]) -> None:
    """Raise OutputError where `validate` would find an error in the folder after changes."""
    errors = errors_with(checkpoint.root, changes, follow_links=checkpoint.follow_links)
    if errors:
        first = errors[0]
        more = f" ({count(len(errors) - 1, 'more error')})" if len(errors) > 1 else ""
        raise OutputError(
            f"{checkpoint.root}: fails validation, so nothing is noted there: {first.rule}: "
            f"{first.where}: {first.message}{more}; mend it (qconvert repair), or omit --write"
        )
