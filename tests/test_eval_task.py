"""`qconvert eval --task`: rows as questions, answers of whole models, lm-evaluation-harness itself."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import calibrate_models as models
import numpy as np
import pytest
import torch
from checkpoints import ran, run_cli
from eval_oracle import whole
from safetensors.torch import load_file, save_file

from qconvert import api
from qconvert.core.errors import DataError, UsageError
from qconvert.evaluate.head import Scores
from qconvert.evaluate.task import Question, Task, TaskResult, question_of, result_of
from qconvert.samples.tokenizer import Tokenizer

Row = Mapping[str, Any]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, and one that answers some questions otherwise."""
    folder = tmp_path_factory.mktemp("task")
    models.saved(models.qwen3_moe(num_hidden_layers=2), folder / "src")
    models.make_tokenizer(folder / "src", bos=True)
    shutil.copytree(folder / "src", folder / "repo")
    drawn = torch.Generator().manual_seed(3)
    for file in sorted((folder / "repo").glob("*.safetensors")):
        noisy = {
            name: one + 1.0 * one.float().std() * torch.randn(one.shape, generator=drawn).to(one.dtype)
            if one.dim() > 1 else one
            for name, one in load_file(file).items()
        }  # fmt: skip
        save_file({name: one.bfloat16() for name, one in noisy.items()}, file, {"format": "pt"})
    return folder


def quiz(count: int) -> list[dict[str, Any]]:
    """Questions of random words: contexts that are empty or end in spaces, choices of any length."""
    drawn = random.Random(7)
    words = [word for word in models.TEXT.split() if word.isalpha()]

    def some(most: int) -> str:
        return " ".join(drawn.choices(words, k=drawn.randint(1, most)))

    rows = []
    for number in range(count):
        choices = [f" {some(4)}" for _ in range(drawn.randint(2, 5))]
        context = "" if not number else some(9) + "  " * (number % 7 == 1)
        rows.append(
            {"context": context, "choices": choices, "answer": drawn.randrange(len(choices))}
        )
    return rows


def written(file: Path, rows: Sequence[Row]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def answered(room: Path, file: Path, **more: Any) -> TaskResult:
    found = api.evaluate(room / "repo", room / "src", file, task=True, devices=["cpu"], **more)
    assert found.task is not None
    return found.task


# --- Rows ------------------------------------------------------------------------------------------

ARC = {
    "id": "1", "question": "Which is hot?", "answerKey": "C",
    "choices": {"text": ["ice", "snow", "fire"], "label": ["A", "B", "C"]},
}  # fmt: skip
HELLASWAG = {
    "activity_label": "Baking", "ctx_a": "A man [step] stirs.", "ctx_b": "he  then", "label": "1",
    "endings": ["leaves.", "bakes [title] it."],
}  # fmt: skip
MMLU = {
    "question": " 2 + 2? ", "subject": "abstract_algebra", "choices": ["3", "4", "5", "6"], "answer": 1,
}  # fmt: skip
ABOUT = "The following are multiple choice questions (with answers) about"
ROWS: list[tuple[Row, Question]] = [
    (
        {"context": "One,", "choices": [" two", " three!"], "answer": 1},
        Question((("One,", " two"), ("One,", " three!")), 1, (4, 7)),
    ),
    ({"context": "One,", "answer": " two"}, Question((("One,", " two"),), 0, (4,))),
    (
        ARC,
        Question(
            tuple(("Question: Which is hot?\nAnswer:", t) for t in (" ice", " snow", " fire")),
            2, (3, 4, 4),
        ),
    ),
    (
        HELLASWAG,
        Question(
            tuple(("Baking: A man stirs. He then", text) for text in (" leaves.", " bakes. it.")),
            1, (7, 10),
        ),
    ),
    (
        MMLU,
        Question(
            tuple(
                (
                    f"{ABOUT} abstract algebra.\n\n2 + 2?\nA. 3\nB. 4\nC. 5\nD. 6\nAnswer:",
                    f" {letter}",
                )
                for letter in "ABCD"
            ),
            1, (1, 1, 1, 1),
        ),
    ),
    (
        {"arguments": {"gen_args_0": {"arg_0": "Q:", "arg_1": " yes"},
                       "gen_args_1": {"arg_0": "Q:", "arg_1": " no"}}, "target": "1", "doc": {}},
        Question((("Q:", " yes"), ("Q:", " no")), 1, (3, 2)),
    ),
    (
        {"arguments": [["Q:", " yes"], ["Q:", " no"]], "target": "no"},
        Question((("Q:", " yes"), ("Q:", " no")), 1, (3, 2)),
    ),
    ({"arguments": [["Q:", " yes"]], "target": "yes"}, Question((("Q:", " yes"),), 0, (3,))),
]  # fmt: skip


@pytest.mark.parametrize(("row", "expected"), ROWS)
def test_rows_are_read_as_the_harness_asks(row: Row, expected: Question) -> None:
    assert question_of(row, "x.jsonl:1") == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "no question"}, "expected a question, by one of these sets of keys"),
        ({"context": "a", "choices": ["b"], "answer": 0}, "expected 2 or more"),
        ({"context": "a", "choices": ["b", "c"], "answer": 2}, "answer 2 is none of its 2 choices"),
        ({"context": "a", "choices": ["b", 3], "answer": 0}, "expected text, found int"),
        ({"context": "a", "choices": ["b", "c"], "answer": "b"}, "expected the number of a choice"),
        ({**ARC, "answerKey": "E"}, "cannot be read as a row with question, choices, answerKey"),
        ({**MMLU, "choices": ["1", "2"]}, "cannot be read as a row with question, choices, answer"),
        ({"arguments": [["a", {"until": []}]], "target": "b"}, "its answers are generated"),
    ],
)
def test_rows_that_are_no_questions_are_refused(row: Row, message: str) -> None:
    with pytest.raises(DataError, match=message) as raised:
        question_of(row, "x.jsonl:7")
    assert str(raised.value).startswith("x.jsonl:7: ")


def test_questions_that_cannot_be_asked(room: Path, tmp_path: Path) -> None:
    long = written(tmp_path / "long.jsonl", [{"context": "fox " * 40, "answer": " cat"}])
    with pytest.raises(DataError, match="more than 16; give --length"):
        answered(room, long, length=16)
    nothing = written(tmp_path / "nothing.jsonl", [{"context": "a", "answer": ""}])
    with pytest.raises(DataError, match="has no token of its own after its context"):
        answered(room, nothing)
    with pytest.raises(DataError, match="expected questions, found no line"):
        answered(room, written(tmp_path / "empty.jsonl", []))
    with pytest.raises(DataError, match="questions are lines of JSON"):
        answered(room, Path(shutil.copy(long, tmp_path / "long.txt")))
    with pytest.raises(UsageError, match="answered by whole models"):
        answered(room, long, layers=1)


# --- Answers ---------------------------------------------------------------------------------------


def scores(source: Sequence[float], repo: Sequence[float], first: Sequence[bool]) -> Scores:
    """Of tokens with these negative log likelihoods, and whether each is REPO's first choice."""
    none = torch.zeros(len(source))
    return Scores(
        none,
        torch.tensor(source),
        torch.tensor(repo),
        none.bool(),
        none.bool(),
        torch.tensor(first),
    )


def test_answers_are_counted() -> None:
    """Three questions of two texts and one of one: likelihoods are summed over the texts' tokens alone,
    the last of each pair, and divided by the characters where length counts."""
    two = (("a", " b"), ("a", " c d"))
    task = Task(
        (Question(two, 0, (2, 4)), Question(two, 1, (2, 4)), Question(two, 1, (2, 4)),
         Question((("a", " b"),), 0, (2,))),
        tuple(np.arange(size) for size in (3, 4, 3, 4, 3, 4, 4)), (1, 2, 1, 2, 1, 2, 2),
    )  # fmt: skip
    far = 90.0  # tokens of contexts
    source = [far, 1, far, 1, 1, far, 1, far, 1, 0.5, far, 3, far, 1, 1, far, 1, 1]
    repo = [far, 3, far, 1, 1, far, 1, far, 3, 3, far, 1, far, 1.5, 1, far, 1, 1]
    first = [False] * 16 + [True, True]
    found = result_of(task, scores(source, repo, first))
    assert (found.questions, found.changed) == (4, 3)
    # SRC: 1 < 2 right, 1 < 1.5 wrong, 2 < 3 right, not its first choice.
    assert (found.accuracy.source, found.accuracy.repo) == (0.5, 0.25)
    # REPO: 2 < 3 wrong, 1 < 6 wrong, 1 < 2.5 wrong, its first choice.
    assert found.accuracy.difference == -0.25
    assert found.accuracy.repo_error == pytest.approx(0.25)
    assert found.accuracy.difference_error == pytest.approx(sqrt(2.75 / 3) / 2)
    # A character: SRC 0.5 = 0.5 (the first), 0.375 < 0.5, 0.5 < 1.5, all right; REPO none.
    assert found.by_length is not None
    assert found.by_length.source == 1
    assert found.by_length.repo == 0
    alone = Task(task.questions[3:], task.tokens[6:], task.scored[6:])
    lost = result_of(alone, scores(source[15:], repo[15:], [True, False, True]))
    assert (lost.accuracy.repo, lost.accuracy.repo_error, lost.by_length) == (0, None, None)


@pytest.mark.parametrize("bos", [False, True])
def test_pairs_become_the_ids_of_their_whole_text(tmp_path: Path, bos: bool) -> None:
    """Spaces at the end of a context belong to the text; BOS is there once, or is all of a context."""
    models.make_tokenizer(tmp_path, bos=bos)
    ours = Tokenizer(tmp_path)

    def ids(text: str, begin: bool = bos) -> list[int]:
        return [0] * begin + ours.pieces([text])[0]

    for context, text in (("The fox", " jumps"), ("The fox ", "jumps")):
        before, after = ours.pair(context, text)
        assert before + after == ids(context + text)
        assert before == ids(context.rstrip())
    assert ours.pair("", " jumps") == ([0], ids(" jumps", False))
    assert ours.pair("<s>The fox", " jumps")[0] == ids("<s>The fox", False)


def test_a_single_text_is_what_greedy_decoding_gives(room: Path, tmp_path: Path) -> None:
    """The source's own next tokens are right, one token changed is not."""
    import transformers

    hf: Any = transformers
    model, tokenizer = whole(room / "src"), hf.AutoTokenizer.from_pretrained(room / "src")
    rows = []
    for question in quiz(12):
        context = question["context"].rstrip()
        ids = tokenizer(context, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            made = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
        text = tokenizer.decode(made[0, ids.shape[1] :])
        again = tokenizer(context + text)["input_ids"]
        if (
            context and again == made[0].tolist()
        ):  # what is decoded need not be read back as its ids
            rows += [
                {"context": context, "answer": text},
                {"context": context, "answer": text + "Q"},
            ]
    assert rows, "no decoded text is read back as its ids"
    found = answered(room, written(tmp_path / "texts.jsonl", rows))
    assert found.accuracy.source == 0.5
    assert found.by_length is None


def test_of_the_command(room: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "quiz.jsonl", quiz(6))
    words = ("eval", room / "repo", "--against", room / "src", "--device", "cpu")
    done = ran(*words, "--task", file, "--samples", "5")
    assert "questions" in done.out
    assert "accuracy, change" in done.out
    assert "accuracy by length, source" in done.out
    told = json.loads(ran(*words, "--task", file, "--json").out)
    assert told["task"]["questions"] == 6
    refused = run_cli(*words, "--task", file, "--data", file)
    assert (refused.code, "give --data FILE or --task FILE" in refused.err) == (2, True)


# --- lm-evaluation-harness -------------------------------------------------------------------------


@pytest.mark.peer
def test_equals_lm_evaluation_harness(
    room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers of the same questions, to the last digit; and of the samples that it logs."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    rows = quiz(10)
    file = written(tmp_path / "quiz.jsonl", rows)
    task = {
        "task": "quiz", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{context}}",
        "doc_to_choice": "choices", "doc_to_target": "{{answer}}", "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }  # fmt: skip
    found = answered(room, file)
    assert found.by_length is not None
    for name in ("src", "repo"):
        model = HFLM(
            pretrained=str(room / name), dtype="bfloat16", device="cpu", batch_size=1,
            softmax_dtype="float32",
        )  # fmt: skip
        theirs = simple_evaluate(model=model, tasks=[task], log_samples=True)
        kind = "source" if name == "src" else "repo"
        for part, metric in ((found.accuracy, "acc"), (found.by_length, "acc_norm")):
            assert getattr(part, kind) == theirs["results"]["quiz"][f"{metric},none"]
            error = theirs["results"]["quiz"][f"{metric}_stderr,none"]
            assert getattr(part, f"{kind}_error") == pytest.approx(error, abs=1e-12)
    logged = [
        {"arguments": one["arguments"], "target": str(one["target"])}
        for one in theirs["samples"]["quiz"]
    ]
    again = answered(room, written(tmp_path / "logged.jsonl", logged))
    assert again.accuracy == found.accuracy
