"""CONTRIBUTING's way to add a family, followed literally in a copy of the repository: what it says to
write is written, and nothing else is touched."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"```(python|yaml)\n# (\S+)\n(.*?)```", re.DOTALL)


def blocks() -> dict[str, str]:
    """What the section on families says to write, by the file's name."""
    text = (_ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## A model family\n")[2].partition("\n## ")[0]
    return {name: f"# {name}\n{body}" for _, name, body in _BLOCK.findall(section)}


@pytest.mark.big  # a process with the tests of all families: 40 s
def test_a_family_is_added_without_editing_a_test(tmp_path: Path) -> None:
    found = blocks()
    assert list(found) == ["layouts/acme_moe.py", "tests/headers/acme-moe.yaml"]
    skipped = shutil.ignore_patterns("__pycache__", ".pytest_cache")
    for folder in ("qconvert", "tests"):
        shutil.copytree(_ROOT / folder, tmp_path / folder, symlinks=True, ignore=skipped)
    shutil.copy(_ROOT / "pyproject.toml", tmp_path)
    for link in ("layouts", "recipes", "validators"):
        (tmp_path / link).symlink_to(Path("qconvert") / link)
    for name, text in found.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
         "tests/test_families.py", "tests/test_derived_agrees.py", "tests/test_roles.py", "-rA",
         "-k", "acme or discovery or header_set or unique or role"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    for test in ("every_name_has_one_role", "nothing_is_missing", "a_lost_tensor_is_missed"):
        ran = rf"PASSED tests/test_families\.py::test_{test}\[[^]]*acme-moe"
        assert re.search(ran, done.stdout), f"{test}: {done.stdout[-3000:]}"
