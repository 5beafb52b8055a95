"""Every benchmark case runs through at its smallest size, other tools included; figures are not judged.

Installed by `make peers`.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kt_machine import needs_avx512

pytestmark = pytest.mark.peer

_RUN = Path(__file__).parent.parent / "benchmarks" / "run.py"


def cases() -> list[str]:
    """The keys of its table, read from the source: an import needs its own folder on the path."""
    for node in ast.parse(_RUN.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_CASES":
            assert isinstance(node.value, ast.Dict)
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    raise AssertionError(f"{_RUN} has no table of cases")


# Up to a minute each, of the same code as the others; QCONVERT_ALL=1 runs them too.
_LONG = (
    "amx", "decoders", "dequant", "encoders", "hashing", "jobs", "kernels", "long", "sizes", "validate",
    "w4a16",
)  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=needs_avx512 if case == "amx" else [])
        for case in cases()
        if case not in _LONG or os.environ.get("QCONVERT_ALL")
    ],
)
def test_a_case_runs_at_its_smallest(case: str, tmp_path: Path) -> None:
    work, found = tmp_path / "made" / "by it", tmp_path / "found.json"
    words = [case, "--smallest", "--work", work, "--json", found]
    done = subprocess.run(
        [sys.executable, _RUN, *map(str, words)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = json.loads(found.read_bytes())
    assert {row["case"].split()[0] for row in rows} == {case}
    assert len(rows) >= 2, "the limit, and what is measured against it"
    assert all(row["seconds"] > 0 for row in rows)
    assert list(work.iterdir()) == [], "its data is removed"


def test_the_hub_against_a_download(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    words = [sys.executable, _RUN.with_name("hub.py"), "--smallest", "--json", found]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for case in json.loads(found.read_bytes()).values():
        download, convert = case
        assert (download["what"], convert["what"]) == ("download", "convert")
        assert 0 < convert["fetched"] < 1.01 * download["fetched"]


def test_a_result_that_goes_to_the_hub_while_it_is_made(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    words = [
        sys.executable,
        _RUN.with_name("hub_stream.py"),
        "w4a16",
        "--smallest",
        "--from",
        "hub",
    ]
    done = subprocess.run(
        [*map(str, words), "--json", str(found)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (rows,) = json.loads(found.read_bytes()).values()
    assert [row["what"] for row in rows] == ["download", "upload", "stream"]
    assert rows[-1]["same"] is True
    assert rows[-1]["sent"] > 0
