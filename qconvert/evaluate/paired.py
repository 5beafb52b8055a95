"""Two conversions of one source on the same tokens: how far their figures are apart, and how surely.

What both lose on a text has most in common: the difference is known far better than either figure, so
its standard error is that of the differences of pairs, over samples or questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from qconvert.evaluate.result import standard_error, sums_of
from qconvert.evaluate.task import Task, result_of

if TYPE_CHECKING:
    import torch

    from qconvert.evaluate.head import Scores

# Standard errors of a difference that chance makes one time in twenty.
SURE = 2.0


@dataclass(frozen=True)
class PairedDifference:
    """The mean of a difference, and its standard error over samples or questions (None: of one)."""

    mean: float
    error: float | None

    @property
    def errors(self) -> float | None:
        """Return the mean in standard errors, with its sign; None where there is no error."""
        return self.mean / self.error if self.error else None


@dataclass(frozen=True)
class Differences:
    """Figures of a folder less those of `than`, another, on the same tokens: `kl` and `loss` (the
    logarithm of perplexity) in nats a token, the part of tokens that it agrees with the source on, and
    the parts of questions answered right. `changed` is how many questions it answers otherwise."""

    than: str
    kl: PairedDifference
    loss: PairedDifference
    agreement: PairedDifference
    accuracy: PairedDifference | None = None
    by_length: PairedDifference | None = None
    changed: int | None = None

    @property
    def better(self) -> bool | None:
        """Return whether the folder loses less than the other, by its KL; None where the difference is
        one that chance makes."""
        errors = self.kl.errors
        return None if errors is None or abs(errors) < SURE else errors < 0

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        found = asdict(self)
        for name, one in vars(self).items():
            if isinstance(one, PairedDifference):
                found[name]["errors"] = one.errors
        return {**found, "better": self.better}


def differences_of(
    than: str, first: Scores, second: Scores, units: Sequence[int], task: Task | None
) -> Differences:
    """Of the second folder's scores and of those of the first, which is `than`, by units that predict so
    many tokens each; `task`: the units are its questions."""

    def paired(a: torch.Tensor, b: torch.Tensor) -> PairedDifference:
        apart = b.double() - a.double()
        return PairedDifference(float(apart.mean()), standard_error(sums_of(apart, units), units))

    found = Differences(
        than, paired(first.kl, second.kl), paired(first.repo, second.repo),
        paired(first.agree, second.agree),
    )  # fmt: skip
    if task is None:
        return found
    answers = result_of(task, replace(second, source=first.repo, source_first=first.repo_first))
    right, normed = (
        None if one is None else PairedDifference(one.difference, one.difference_error)
        for one in (answers.accuracy, answers.by_length)
    )
    return replace(found, accuracy=right, by_length=normed, changed=answers.changed)
