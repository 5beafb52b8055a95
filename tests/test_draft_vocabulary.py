"""Drafts with a vocabulary of their own (EAGLE3): what their tables of tokens must be, in the form of
sglang and vLLM and in that of speculators; and the tables as those runtimes compute with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import Tensor, run_cli
from checkpoints import tensor as any_tensor
from draft_tables import (
    DRAFT,
    HIDDEN,
    TOKENS,
    Config,
    Tensors,
    eagle3,
    flags,
    numbers,
    table,
    write_draft,
)

from qconvert.validation.findings import Finding
from qconvert.validation.runner import Request, validate_folder


def found(folder: Path) -> list[Finding]:
    report = validate_folder(folder, None, request=Request("full", jobs=1))
    return [one for one in report.findings if one.rule == "QC138"]


@pytest.mark.parametrize("dtype", ["I64", "I32"])
@pytest.mark.parametrize("form", ["sglang", "speculators"])
def test_sound_tables_are_proved(form: str, dtype: str, tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "draft", *eagle3(form, dtype))
    report = validate_folder(folder, None, request=Request("full", jobs=1))
    assert not [one for one in report.findings if one.rule == "QC138"]
    assert "the draft's tokens are the target's, each once" in report.proved
    assert "the draft's tables of tokens fit its head and config" in report.proved


def test_other_folders_are_not_asked(tmp_path: Path) -> None:
    tensors = {"lm_head.weight": any_tensor("BF16", DRAFT, HIDDEN)}
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 0,
        "vocab_size": 99,
    }
    report = validate_folder(
        write_draft(tmp_path / "model", tensors, config), None, request=Request("full", jobs=1)
    )
    assert not [line for line in report.proved if "draft's" in line]
    assert not [one for one in report.findings if one.rule == "QC138"]


def test_a_copy_keeps_them(tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "draft", *eagle3())
    assert run_cli("run", "copy", folder, tmp_path / "out", "--jobs", "1").code == 0
    assert not found(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["draft_vocab_size"] == DRAFT


def _set(name: str, value: Tensor) -> Callable[[Tensors, Config], None]:
    return lambda tensors, config: tensors.update({name: value})


def _changed(at: int, to: int) -> Callable[[Tensors, Config], None]:
    added = numbers() - np.arange(DRAFT)
    added[at] = to - at
    return _set("d2t", table(added))


@pytest.mark.parametrize("form", ["sglang", "speculators"])
@pytest.mark.parametrize(
    ("change", "where", "text"),
    [
        (lambda t, c: t.pop("d2t"), "lm_head.weight", "runtimes take the draft's numbers for the"),
        (_set("d2t", any_tensor("BF16", DRAFT)), "d2t", "expected a list of integers, found BF16 [40]"),
        (_set("d2t", table(numbers()[:30])), "d2t", "has 30 numbers, expected 40, the rows of the head"),
        (
            lambda t, c: c.update(draft_vocab_size=41), "d2t",
            "has 40 numbers, expected 41, the config.json's draft_vocab_size",
        ),
        (lambda t, c: c.pop("draft_vocab_size"), "config.json", "expected 40, the length of d2t"),
        (_set("t2d", flags(numbers(), 310)), "t2d", "a flag for each of 300 tokens, found BOOL [310]"),
        (_set("d2t", table(numbers())), "d2t", "of the target, which has 300"),
        (_changed(7, -1), "d2t", "token 7 of the draft is -1 of the target"),
        (_changed(39, TOKENS), "d2t", f"token 39 of the draft is {TOKENS} of the target"),
        (_changed(8, int(numbers()[5])), "d2t", "tokens 5 and 8 of the draft are both"),
        (_set("t2d", flags(numbers()[:-1])), "t2d", f"token {numbers()[-1]} is in d2t"),
        (
            _set("t2d", flags([*numbers(), min({*range(TOKENS)} - {*numbers().tolist()})])), "t2d",
            "is not in d2t, and the flag says otherwise",
        ),
    ],
)  # fmt: skip
def test_tables_that_lead_elsewhere_are_found(
    form: str, change: Callable[[Tensors, Config], Any], where: str, text: str, tmp_path: Path
) -> None:
    tensors, config = eagle3(form)
    change(tensors, config)
    findings = found(write_draft(tmp_path / "draft", tensors, config))
    assert (where, True) in {(one.where, text in one.message) for one in findings}
