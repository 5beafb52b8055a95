"""`qconvert eval A B`: several folders beside one source, and what they differ by."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import calibrate_models as models
import eval_oracle as oracle
import numpy as np
import pytest
import torch
from checkpoints import convert, ran, run_cli, tree

from qconvert import api
from qconvert.cli import evaluation_report as report
from qconvert.core.manifest_keys import parse_manifest
from qconvert.evaluate.head import Scores
from qconvert.evaluate.paired import Differences, PairedDifference, differences_of
from qconvert.evaluate.result import standard_error
from qconvert.evaluate.task import Question, Task

SAMPLES = [models.samples(1, length, seed=length)[0] for length in (40, 23, 31, 12)]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, three conversions of it, its CPU experts, and data."""
    folder = tmp_path_factory.mktemp("beside")
    models.saved(models.qwen3_moe(), folder / "src")
    models.make_tokenizer(folder / "src", bos=True)
    for name, *words in (
        ("int4", "w4a16", "--rtn", "--group-size", "32"),
        ("int8", "w4a16", "--rtn", "--group-size", "32", "--bits", "8"),
        ("fp8", "fp8"),
        ("cpu", "amx", "--method", "int8", "--numa", "1"),
    ):
        ran(words[0], folder / "src", folder / name, *words[1:], "--jobs", "1")
    rows = [json.dumps({"input_ids": sample.tolist()}) for sample in SAMPLES]
    (folder / "ids.jsonl").write_text("\n".join(rows))
    return folder


def evaluated(
    room: Path, names: Sequence[str], data: str = "ids.jsonl", **more: Any
) -> api.Evaluation:
    first, *others = (room / name for name in names)
    return api.evaluate(first, room / "src", room / data, beside=others, devices=["cpu"], **more)


def command(room: Path, *names: str | Path, data: str = "--data", file: str = "ids.jsonl") -> Any:
    words = ("--against", room / "src", data, room / file, "--device", "cpu", "--json")
    return json.loads(ran("eval", *(room / name for name in names), *words).out)


# --- Together and alone ----------------------------------------------------------------------------


def test_each_is_what_it_is_alone(room: Path) -> None:
    """To the bit, CPU experts among them; and the source runs once."""
    names = ("int4", "int8", "cpu", "fp8")
    counted: list[tuple[int, int]] = []
    found = evaluated(
        room, names, pair=room / "fp8", events=lambda done, total: counted.append((done, total))
    )
    every = (replace(found, beside=()), *(replace(one, differences=None) for one in found.beside))
    for name, one in zip(names, every, strict=True):
        pair = room / "fp8" if name == "cpu" else None
        assert one == evaluated(room, [name], pair=pair), name
    assert counted[-1] == (5 * 4 * len(SAMPLES),) * 2


def test_some_layers_have_no_differences(room: Path) -> None:
    found = evaluated(room, ("int4", "int8"), layers=2)
    (other,) = found.beside
    assert (len(other.hidden), other.logits, other.differences) == (2, None, None)
    assert other == evaluated(room, ["int8"], layers=2)
    assert "int8" in report.as_text(found)


def test_a_pair_for_no_cpu_experts(room: Path) -> None:
    with pytest.raises(api.UsageError, match="--pair needs the folder of the CPU's experts"):
        evaluated(room, ("int4", "int8"), pair=room / "fp8")


def test_the_disk_of_all_is_counted(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files of hidden states for each model, and two more while experts answer."""
    tokens = sum(sample.size for sample in SAMPLES)
    for count in (1, 3):
        need = tokens * (2 * (2 * (count + 1) + 2) * 128 + 128) + (1 << 20)
        names = ("int4", "int8", "fp8")[:count]
        for free in (need - 1, need):
            monkeypatch.setattr(
                "shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free)
            )
            if free == need:
                evaluated(room, names, layers=1)
            else:
                with pytest.raises(api.RunError, match="set TMPDIR to a larger disk"):
                    evaluated(room, names, layers=1)


# --- Differences -----------------------------------------------------------------------------------


def of_samples(values: Sequence[torch.Tensor]) -> PairedDifference:
    """The mean over all tokens, and the standard error of a ratio of sums over samples, by numpy."""
    sums = np.array([float(one.sum()) for one in values])
    sizes = np.array([one.numel() for one in values])
    mean = sums.sum() / sizes.sum()
    count = len(sums)
    return PairedDifference(
        mean, np.sqrt(count) * np.std(sums - mean * sizes, ddof=1) / sizes.sum()
    )


def test_differences_are_of_the_same_tokens(room: Path, tmp_path: Path) -> None:
    """By transformers' own runs of the whole models, and numpy."""
    (other,) = evaluated(room, ("int4", "int8")).beside
    assert other.differences is not None
    runs = []
    for name in ("int4", "int8"):
        convert("dequant", room / name, tmp_path / name)
        runs.append(oracle.run(oracle.whole(tmp_path / name), SAMPLES).logits)
    source = oracle.run(oracle.whole(room / "src"), SAMPLES).logits
    kls, losses, agreed = [], [], []
    for place, sample in enumerate(SAMPLES):
        p, a, b = (one[place][:-1].log_softmax(1) for one in (source, *runs))
        kls.append((p.exp() * (a - b)).sum(1))
        losses.append((a - b).gather(1, torch.from_numpy(sample[1:])[:, None]))
        hits = [(p.argmax(1) == one.argmax(1)).double() for one in (a, b)]
        agreed.append(hits[1] - hits[0])
    found = other.differences
    for ours, theirs in ((found.kl, kls), (found.loss, losses), (found.agreement, agreed)):
        wanted = of_samples(theirs)
        assert ours.mean == pytest.approx(wanted.mean, abs=1e-5)
        assert ours.error == pytest.approx(wanted.error, abs=1e-5)
    assert found.kl.error is not None
    assert found.kl.errors == found.kl.mean / found.kl.error
    assert found.kl.errors < -3
    assert (found.better, found.than) == (True, str(room / "int4"))


def scores(kl: Sequence[float], **more: Sequence[float]) -> Scores:
    values = {"source": kl, "repo": kl, "agree": kl, "source_first": kl, "repo_first": kl, **more}
    return Scores(
        torch.tensor(kl), *(
            torch.tensor(one) if name in ("source", "repo") else torch.tensor(one).bool()
            for name, one in values.items()
        ),
    )  # fmt: skip


def test_what_both_lose_is_no_error() -> None:
    """Samples differ by far more than the two folders do."""
    first, second = scores([1.0, 1, 50, 50, 9]), scores([1.5, 1, 50.5, 50, 9.25])
    found = differences_of("a", first, second, [2, 2, 1], None)
    assert found.kl == PairedDifference(0.25, 0.0)
    assert found.kl.errors is None
    assert standard_error([2.0, 100, 9], [2, 2, 1]) > 10  # type: ignore[operator]
    swapped = differences_of("b", second, scores([0.0, 0, 0, 0, 0]), [2, 2, 1], None)
    assert (swapped.kl.mean, swapped.better) == (-22.45, None)
    assert differences_of("a", first, second, [5], None).kl == PairedDifference(0.25, None)


@pytest.mark.parametrize(
    ("mean", "error", "better", "says"),
    [
        (-0.3, 0.1, True, "/b is better than /a: less KL divergence (3.0 standard errors)"),
        (0.3, 0.1, False, "/a is better than /b: less KL divergence (3.0 standard errors)"),
        (
            0.19,
            0.1,
            None,
            "by no more than chance makes (1.9 standard errors); give more --samples",
        ),
        (0.0, 0.0, None, "the same KL divergence in every sample"),
        (0.3, None, None, "no standard error of the difference, with one sample"),
    ],
)
def test_the_verdict(mean: float, error: float | None, better: bool | None, says: str) -> None:
    one = PairedDifference(mean, error)
    apart = Differences("/a", one, one, one)
    assert apart.better is better
    assert report.verdict("/a", "/b", apart).endswith(says)


# --- Questions -------------------------------------------------------------------------------------


def test_answers_are_paired_by_question() -> None:
    two = (("a", " b"), ("a", " c d"))
    task = Task(
        (Question(two, 0, (2, 4)), Question(two, 1, (2, 4)), Question(two, 0, (2, 4))),
        tuple(np.arange(size) for size in (3, 4, 3, 4, 3, 4)), (1, 2, 1, 2, 1, 2),
    )  # fmt: skip
    assert task.units == [5, 5, 5]
    right = [9.0, 1, 9, 1, 1]  # the first text is likelier
    wrong = [9.0, 5, 9, 1, 1]
    first = scores(right * 3, repo=[*right, *right, *wrong])
    second = scores(right * 3, repo=[*right, *wrong, *right])
    found = differences_of("a", first, second, task.units, task)
    # The first answers 1, 0, 0 right; the second 1, 1, 1.
    assert found.accuracy is not None
    assert found.accuracy.mean == pytest.approx(2 / 3)
    assert found.accuracy.error == pytest.approx(np.std([0, 1, 1], ddof=1) / np.sqrt(3))
    assert found.changed == 2


def test_questions_of_the_command(room: Path) -> None:
    words = [word for word in models.TEXT.split() if word.isalpha()]
    rows = [
        {"context": " ".join(words[n : n + 5]), "choices": [f" {words[n + 7]}", f" {words[n + 9]}"],
         "answer": n % 2}
        for n in range(12)
    ]  # fmt: skip
    (room / "quiz.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = command(room, "int4", "int8", data="--task", file="quiz.jsonl")
    (other,) = told["beside"]
    apart = other["differences"]
    alone = command(room, "int8", data="--task", file="quiz.jsonl")
    assert other["task"] == alone["task"]
    assert other["logits"] == alone["logits"]
    accuracies = [one["task"]["accuracy"]["repo"] for one in (told, other)]
    assert apart["accuracy"]["mean"] == pytest.approx(accuracies[1] - accuracies[0])
    assert {"mean", "error", "errors"} == set(apart["accuracy"])
    assert apart["changed"] is not None


# --- Shown and written -----------------------------------------------------------------------------


def test_text_page_and_json_name_the_better(room: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    words = ("--against", room / "src", "--data", room / "ids.jsonl", "--device", "cpu")
    text = ran("eval", room / "int4", room / "int8", *words, "--report", page).out
    told = command(room, "int4", "int8")
    (other,) = told["beside"]
    apart = other["differences"]
    assert (told["differences"], apart["better"], apart["than"]) == (None, True, told["folder"])
    assert " ".join(text.split()).startswith(f"{other['folder']} is better than {told['folder']}")
    assert max(map(len, text.splitlines())) <= 60
    for one in (told, other):
        assert f"{one['logits']['kl']:.4g} nats a token" in text
        assert f"{one['logits']['kl']:.4g} nats a token" in page.read_text()
    for shown in (f"{apart['kl']['mean']:+.2g}", f"{apart['kl']['errors']:.1f}"):
        assert shown in text
        assert f">{shown}<" in page.read_text()
    assert page.read_text().count("<svg") == 2
    assert text.count("note: weights alone") == 1


def test_each_folder_keeps_its_own(room: Path, tmp_path: Path) -> None:
    made = [shutil.copytree(room / name, tmp_path / name) for name in ("int4", "int8")]
    words = ("--against", room / "src", "--data", room / "ids.jsonl", "--device", "cpu", "--write")
    told = json.loads(ran("eval", *made, *words, "--json").out)
    for folder, one in zip(made, (told, *told["beside"]), strict=True):
        noted = parse_manifest((folder / "qconvert.json").read_bytes(), folder)["evaluation"]
        assert noted["logits"] == one["logits"]
        assert not {"beside", "differences"} & set(noted)
    before = tree(made[0])
    refused = run_cli("eval", made[0], room / "src", *words)
    assert (refused.code, "has no qconvert.json" in refused.err) == (1, True)
    assert tree(made[0]) == before
