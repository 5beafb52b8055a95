"""The fused linear-attention kernels in Triton's interpreter: equal to torch over all cases, and every
wrong order is found. On a GPU: tests/kernel_matrix.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import copied, edit_json

from qconvert.cli.demo import write_sample

_TESTS = Path(__file__).parent


def interpreted(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """A command in a process where Triton interprets: it must be told before it is imported."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run(
        [sys.executable, *map(str, command)], env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.big
def test_every_case_fits() -> None:
    done = interpreted(_TESTS / "kernel_matrix.py", "gdn")
    lines = [line.split("\t") for line in done.stdout.splitlines() if line.startswith("gdn\t")]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert {line[1] for line in lines} == {"fits"}
    names = {line[-1].partition(":")[0] for line in lines}
    for part in ("r=1 ", "r=2 ", "r=3 ", "r=4 ", "r=8 ", "T=1 ", "T=2 ", "T=7 ", "bfloat16", "float16",
                 "float32", "G=1 ", "G=2 ", "+0", "+24"):  # fmt: skip
        assert any(part in name for name in names), part


@pytest.fixture(scope="module")
def wrong() -> dict[str, list[str]]:
    done = interpreted(_TESTS / "gdn_wrong.py")
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("what", ["contiguous", "interleaved", "rank-major"])
def test_right_orders_fit(what: str, wrong: dict[str, list[str]]) -> None:
    assert wrong[what] == []


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("interleaved, said to be contiguous", {"qkv", "z", "b", "a"}),
        ("contiguous, said to be interleaved", {"qkv", "z", "b", "a"}),
        ("rank-major, said to be contiguous", {"qkv", "z", "b", "a"}),
        ("k before q", {"qkv"}),
        ("a before b", {"b", "a"}),
        ("ba cut at its midpoint", {"b", "a"}),
    ],
)
def test_wrong_orders_do_not(what: str, parts: set[str], wrong: dict[str, list[str]]) -> None:
    """And it is the projections that tell: the kernel itself is right."""
    assert set(wrong[what]) == {f": {part} of apart" for part in parts}


def test_one_token_does_not_show_a_stride(wrong: dict[str, list[str]]) -> None:
    assert wrong["dense rows, one token"] == []
    assert wrong["dense rows, two tokens"] == ["b", "a"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    room = tmp_path_factory.mktemp("gdn")
    write_sample(room / "source")
    command = ("-m", "qconvert", "fuse", room / "source", room / "out", "--for", "sglang")
    assert interpreted(*command).returncode == 0
    return room / "source", room / "out"


def kernels(source: Path, out: Path) -> tuple[set[str], str]:
    """Rules broken, and all that is printed."""
    command = (
        "validate",
        out,
        "--against",
        source,
        "--kernels",
        "--layers",
        "0,1",
        "--json",
        "--level",
        "sample",
    )
    done = interpreted(_TESTS / "short_kernels.py", *command)
    assert done.stdout, done.stderr
    return {found["rule"] for found in json.loads(done.stdout)["findings"]}, done.stdout


@pytest.mark.big
def test_a_real_pair_fits(pair: tuple[Path, Path]) -> None:
    rules, text = kernels(*pair)
    assert rules == set()
    assert "layer 0: qkv of apart" in text
    assert "interpreter" in text


@pytest.mark.big
def test_a_pair_in_another_order_than_stated_does_not(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    out = copied(pair[1], tmp_path / "out")
    edit_json(out / "qconvert.json", lambda manifest: manifest.update(gdn_groups=2))
    rules, _ = kernels(pair[0], out)
    assert "QC070" in rules
