"""Run by themselves, out of a process that has not imported torch: a fork of one that has copies the
page tables of all that, and a list of kills took 24 s for 6. Ops run in one form: tests
that convert the same without a kill run both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import both_forms
import faults
import pytest
from models import qwen3_moe

from crash.cases import CASES, PAIRS, PLAIN, Case, Converting, case_of, convert_plain


@pytest.fixture(scope="session", autouse=True)
def _one_form() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(both_forms.VARIABLE, "none")
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.write_small(tmp_path_factory.mktemp("crash") / "source")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer with two experts in FP8, in two files, and a side file."""
    model = qwen3_moe("fp8", intermediate=128, layers=1)
    model.config["vocab_size"] = 8
    del model.side_files["README.md"]
    return model.write(tmp_path_factory.mktemp("crash") / "experts")


@pytest.fixture(scope="module")
def case_by(
    source: Path, experts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Converting, str], Case]:
    def made(convert: Converting, kind: str) -> Case:
        model = source if convert is convert_plain else experts
        return case_of(convert, kind, model, tmp_path_factory.mktemp("undisturbed"))

    return made


def _name(param: tuple[Converting, str]) -> str:
    return f"{param[0].__name__[8:]}-{param[1]}"


@pytest.fixture(scope="module", params=CASES, ids=_name)
def case(request: pytest.FixtureRequest, case_by: Callable[[Converting, str], Case]) -> Case:
    return case_by(*request.param)


@pytest.fixture(scope="module", params=PLAIN, ids=_name)
def plain(request: pytest.FixtureRequest, case_by: Callable[[Converting, str], Case]) -> Case:
    return case_by(*request.param)


@pytest.fixture(scope="module", params=PAIRS, ids=_name)
def pair(request: pytest.FixtureRequest, case_by: Callable[[Converting, str], Case]) -> Case:
    return case_by(*request.param)
