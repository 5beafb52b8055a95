"""The three ways of ARCHITECTURE.md, walked: every station is called, in the order of the figure."""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from checkpoints import run_cli
from models import qwen3_moe

import qconvert

_ROOT = Path(__file__).parent.parent
_PACKAGE = Path(qconvert.__file__).parent
_MOST = 15  # stations of a figure that is still looked at
_STATION = re.compile(r"^ *(\d+) {2}(\S+\.py) +(\w+(?:\.\w+)?)", re.M)


def figures() -> dict[str, list[str]]:
    """Stations of each way, `file.py name`, by its heading."""
    text = (_ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    part = text.split("\n## Three ways")[1].split("\n## ")[0]
    found = {}
    for section in part.split("\n### ")[1:]:
        numbers, files, names = zip(*_STATION.findall(section), strict=True)
        assert [int(n) for n in numbers] == list(range(1, len(numbers) + 1)), section
        found[section.partition(":")[0]] = [f"{f} {n}" for f, n in zip(files, names, strict=True)]
    return found


def forget() -> None:
    """Empty what the package remembers between calls: a station whose answer is known is not passed, and
    which tests ran before in this process is chance."""
    for name, module in list(sys.modules.items()):
        if name.startswith("qconvert."):
            for one in vars(module).values():
                if isinstance(one, functools._lru_cache_wrapper):
                    one.cache_clear()


def walked(run: Callable[[], object]) -> list[str]:
    """Functions of the package in the order in which they were first called, in any thread."""
    forget()
    seen: dict[str, None] = {}
    above = f"{_PACKAGE}/"

    def look(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(above):
            seen.setdefault(f"{code.co_filename.removeprefix(above)} {code.co_qualname}")

    before = sys.getprofile()
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(before)
        threading.setprofile(before)
    return list(seen)


def _check(stations: list[str], run: Callable[[], object]) -> None:
    order = walked(run)
    missing = [station for station in stations if station not in order]
    assert missing == [], "no such station was passed"
    assert sorted(stations, key=order.index) == stations, "the stations are passed in another order"


def test_there_are_three() -> None:
    ways = figures()
    assert len(ways) == 3
    assert all(len(stations) <= _MOST for stations in ways.values())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return qwen3_moe("fp8", layers=1).write(tmp_path / "source")


def _ran(*words: str | Path) -> Callable[[], object]:
    return lambda: run_cli(*words, "--jobs", "1")


def test_from_a_path_to_bytes(source: Path, tmp_path: Path) -> None:
    _check(figures()["From a path to bytes"], _ran("dequant", source, tmp_path / "out"))


def test_from_an_fp8_tensor_to_amx_tiles(source: Path, tmp_path: Path) -> None:
    words = "amx", source, tmp_path / "out", "--method", "int4", "--numa", "2"
    _check(figures()["From an FP8 tensor to AMX tiles"], _ran(*words))


def test_from_a_finding_to_the_page(source: Path, tmp_path: Path) -> None:
    made, page = tmp_path / "out", tmp_path / "page.html"
    assert run_cli("dequant", source, made, "--jobs", "1").code == 0
    shard = next(made.glob("*.safetensors"))
    with shard.open("r+b") as stream:
        stream.seek(-1, 2)
        last = stream.read(1)
        stream.seek(-1, 2)
        stream.write(bytes([last[0] ^ 0x40]))
    words = "validate", made, "--against", source, "--level", "full", "--report", page
    _check(figures()["From a finding to the page"], _ran(*words))
    assert "QC0" in page.read_text(encoding="utf-8")
