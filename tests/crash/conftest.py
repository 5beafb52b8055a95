"""Run by themselves, out of a process that has not imported torch: a fork of one that has copies the
page tables of all that, and a list of kills took 24 s for 6. Ops run in one form: tests
that convert the same without a kill run both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import both_forms
import faults
import pytest
from faults import Tree, convert, tree


@pytest.fixture(scope="session", autouse=True)
def _one_form() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(both_forms.VARIABLE, "none")
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.write_small(tmp_path_factory.mktemp("crash") / "source")


@pytest.fixture(scope="module", params=sorted(faults.SHARD_SIZES))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def wanted(source: Path, kind: str, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """What an undisturbed run makes."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    convert(source, out, faults.options(kind))
    return tree(out)
