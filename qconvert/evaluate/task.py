"""Questions that both models answer, and how many they answer right, as lm-evaluation-harness counts.

A row of JSONL is one of:

| row | what is asked |
|---|---|
| `arguments`, `target` | what lm-evaluation-harness asked (`--log_samples`), with its examples |
| `context`, `choices`, `answer` | which choice is the likeliest after the context, by number |
| `context`, `answer` | whether greedy decoding continues the context with that text |
| ARC: `question`, `choices`, `answerKey` | as its tasks `arc_easy`, `arc_challenge`, without examples |
| HellaSwag: `ctx_a`, `ctx_b`, `endings`, `label` | as its task `hellaswag` |
| MMLU: `question`, `choices`, `answer`, `subject` | as its tasks `mmlu_*`, without examples |

Source: lm-evaluation-harness 0.4.13 (`api/model.py`, `_encode_pair`: how a pair becomes ids;
`api/task.py`, `process_results`: what is right; `api/metrics.py`, `mean_stderr`; `tasks/arc`,
`tasks/hellaswag`, `tasks/mmlu/default`: the text of questions).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from qconvert.core.errors import DataError
from qconvert.core.shown import count
from qconvert.evaluate.result import standard_error
from qconvert.samples.data import JsonLines, check_ids, sample_order, vocab_size
from qconvert.samples.request import DataSpec
from qconvert.samples.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    import torch

    from qconvert.evaluate.head import Scores

    Ids = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

Row = Mapping[str, Any]
_LETTERS = "ABCD"
_DELIMITER = (
    " "  # between a question and its answer, in all tasks of the harness that are read here
)


@dataclass(frozen=True)
class Question:
    """Pairs of a context and a text that may follow it, of which that numbered `answer` is right, and
    the `lengths` of the texts in characters. A single pair asks whether greedy decoding gives the
    text."""

    pairs: tuple[tuple[str, str], ...]
    answer: int
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """Questions as ids: `tokens` of every pair in order, int64 [ids], of which the last `scored` are
    those of the text that follows."""

    questions: tuple[Question, ...]
    tokens: tuple[Ids, ...]
    scored: tuple[int, ...]

    @property
    def units(self) -> list[int]:
        """Return how many tokens of each question's pairs are predicted: pairs of one question have its
        context in common."""
        pairs = iter(self.tokens)
        return [sum(next(pairs).size - 1 for _ in one.pairs) for one in self.questions]


@dataclass(frozen=True)
class Accuracy:
    """Parts of questions that are answered right, by REPO and by SRC, with the standard error of each
    (None: of one question), and the difference REPO - SRC with its own, over pairs of answers."""

    repo: float
    source: float
    repo_error: float | None
    source_error: float | None
    difference: float
    difference_error: float | None


@dataclass(frozen=True)
class TaskResult:
    """Answers to `questions`: `accuracy` by the likeliest text (`acc`), or by greedy decoding where
    there is one text; `by_length` by the likeliest a character (`acc_norm`), None where no question has
    choices; `changed` is how many questions REPO answers otherwise than SRC."""

    questions: int
    accuracy: Accuracy
    by_length: Accuracy | None
    changed: int


def load_task(spec: DataSpec, folder: Path) -> Task:
    """Questions of a file of JSONL, the first `samples` or those drawn by `seed`, in ids of the
    tokenizer in `folder`. Raises DataError, with file and line, for a row that is no question, and for
    one of more than `length` ids."""
    import numpy as np

    if spec.kind != "jsonl":
        raise DataError(f"{spec.data}: questions are lines of JSON; expected a name in .jsonl")
    tokenizer, vocab = Tokenizer(folder), vocab_size(folder)
    assert spec.data is not None
    rows = JsonLines(Path(spec.data), None, tokenizer)
    questions, tokens, scored = [], [], []
    for number in list(sample_order(len(rows), spec.seed))[: spec.samples]:
        where = rows.where(number)
        question = question_of(rows.row(number), where)
        for context, text in question.pairs:
            before, after = tokenizer.pair(context, text)
            if not after:
                raise DataError(f"{where}: {text!r} has no token of its own after its context")
            if len(before) + len(after) > spec.length:
                raise DataError(
                    f"{where}: has {len(before) + len(after)} tokens, more than {spec.length}; give "
                    f"--length {len(before) + len(after)}, or shorter questions"
                )
            check_ids([*before, *after], vocab, where)
            tokens.append(np.array([*before, *after], dtype=np.int64))
            scored.append(len(after))
        questions.append(question)
    if not questions:
        raise DataError(f"{spec.data}: expected questions, found no line")
    return Task(tuple(questions), tuple(tokens), tuple(scored))


# --- Rows ----------------------------------------------------------------------------------------


def question_of(row: Row, where: str) -> Question:
    """A row as a question. Raises DataError, naming `where`."""
    for keys, read in _FORMS:
        if set(keys) <= set(row):
            try:
                found = read(row)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise DataError(
                    f"{where}: cannot be read as a row with {', '.join(keys)}: {error}"
                ) from error
            if not 0 <= found.answer < len(found.pairs):
                raise DataError(
                    f"{where}: answer {found.answer} is none of its "
                    f"{count(len(found.pairs), 'choice')}, which are counted from 0"
                )
            return found
    forms = "; ".join(", ".join(keys) for keys, _ in _FORMS)
    raise DataError(
        f"{where}: expected a question, by one of these sets of keys: {forms}; found "
        f"{', '.join(row) or 'none'}"
    )


def _logged(row: Row) -> Question:
    """A sample that lm-evaluation-harness logged."""
    arguments = row["arguments"]
    if isinstance(arguments, Mapping):  # as written: {"gen_args_0": {"arg_0": ..., "arg_1": ...}}
        arguments = [[one["arg_0"], one["arg_1"]] for one in arguments.values()]
    pairs = [(_text(context), text) for context, text in arguments]
    if not all(isinstance(text, str) for _, text in pairs):
        raise ValueError("its answers are generated, and only texts that are given are scored here")
    # Without the space that tasks put before an answer.
    texts = [text.removeprefix(_DELIMITER) for _, text in pairs]
    target, answer = str(row["target"]), 0
    if len(pairs) > 1:
        answer = int(target) if target.isdigit() else texts.index(target)
    return Question(tuple(pairs), answer, tuple(map(len, texts)))


def _with_choices(row: Row) -> Question:
    texts = [_text(choice) for choice in row["choices"]]
    if len(texts) < 2:
        raise ValueError("choices: expected 2 or more")
    pairs = tuple((_text(row["context"]), text) for text in texts)
    return Question(pairs, _number(row["answer"]), tuple(map(len, texts)))


def _with_text(row: Row) -> Question:
    text = _text(row["answer"])
    return Question(((_text(row["context"]), text),), 0, (len(text),))


def _arc(row: Row) -> Question:
    choices = row["choices"]
    context = f"Question: {_text(row['question'])}\nAnswer:"
    return _asked(context, choices["text"], choices["label"].index(row["answerKey"]))


def _hellaswag(row: Row) -> Question:
    text = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return _asked(_cleaned(text), map(_cleaned, row["endings"]), int(row["label"]))


def _mmlu(row: Row) -> Question:
    about = row.get("subject")
    first = "" if about is None else (
        "The following are multiple choice questions (with answers) about "
        f"{' '.join(about.split('_'))}.\n\n"
    )  # fmt: skip
    choices = zip(_LETTERS, row["choices"], strict=True)
    lines = [row["question"].strip(), *(f"{letter}. {text}" for letter, text in choices), "Answer:"]
    return _asked(first + "\n".join(lines), _LETTERS, _number(row["answer"]))


_FORMS: Sequence[tuple[tuple[str, ...], Callable[[Row], Question]]] = (
    (("arguments", "target"), _logged),
    (("context", "choices", "answer"), _with_choices),
    (("context", "answer"), _with_text),
    (("question", "choices", "answerKey"), _arc),
    (("ctx_a", "ctx_b", "endings", "label"), _hellaswag),
    (("question", "choices", "answer"), _mmlu),
)


def _asked(context: str, texts: Any, answer: int) -> Question:
    found = list(map(_text, texts))
    return Question(
        tuple((context, _DELIMITER + text) for text in found), answer, tuple(map(len, found))
    )


def _cleaned(text: str) -> str:
    """Text of HellaSwag without the marks of its source."""
    without = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return without.replace("  ", " ")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {type(value).__name__}")
    return value


def _number(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"answer: expected the number of a choice, found {value!r}")
    return value


# --- Answers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Answers:
    """Answers of one model, by question: the likeliest choice, the likeliest by length (None: there is
    one text), and whether they are right."""

    chosen: tuple[int, ...]
    right: tuple[bool, ...]
    by_length: tuple[bool, ...]


def result_of(task: Task, scores: Scores) -> TaskResult:
    """Answers by the scores of all tokens of a task's pairs but the first of each."""
    repo = _answers(task, scores.repo, scores.repo_first)
    source = _answers(task, scores.source, scores.source_first)
    normed = _accuracy(repo.by_length, source.by_length) if repo.by_length else None
    changed = sum(a != b for a, b in zip(repo.chosen, source.chosen, strict=True))
    return TaskResult(len(task.questions), _accuracy(repo.right, source.right), normed, changed)


def _answers(task: Task, losses: torch.Tensor, first: torch.Tensor) -> _Answers:
    """By negative log likelihoods [P], and whether each token was the model's first choice [P]."""
    chosen, right, by_length = [], [], []
    pairs = _of_pairs(task, losses, first)
    for question in task.questions:
        found = [next(pairs) for _ in question.pairs]
        if len(found) == 1:
            chosen.append(int(found[0][1]))
            right.append(found[0][1])
            continue
        sums = [likelihood for likelihood, _ in found]
        best = sums.index(max(sums))
        chosen.append(best)
        right.append(best == question.answer)
        lengths = zip(sums, question.lengths, strict=True)
        shares = [total / length if length else total for total, length in lengths]
        by_length.append(shares.index(max(shares)) == question.answer)
    return _Answers(tuple(chosen), tuple(right), tuple(by_length))


def _of_pairs(
    task: Task, losses: torch.Tensor, first: torch.Tensor
) -> Iterator[tuple[float, bool]]:
    """The log likelihood of each pair's text, and whether greedy decoding gives it."""
    end = 0
    for ids, scored in zip(task.tokens, task.scored, strict=True):
        end += ids.size - 1
        yield -float(losses[end - scored : end].sum()), bool(first[end - scored : end].all())


def _accuracy(repo: Sequence[bool], source: Sequence[bool]) -> Accuracy:
    apart = [int(a) - int(b) for a, b in zip(repo, source, strict=True)]
    return Accuracy(
        mean(map(float, repo)), mean(map(float, source)), _error(repo), _error(source),
        mean(map(float, apart)), _error(apart),
    )  # fmt: skip


def _error(values: Sequence[float]) -> float | None:
    """The standard error of a mean."""
    return standard_error(values, [1] * len(values))
