"""What the package makes, offers and says, as text under tests/golden/: a change shows as a diff.

A file has sections: a line that names one, and below it lines that are indented. A test asks for its own
sections while it does its other work, and costs nothing more:

    outputs.txt   of every folder that test_mutants.py, test_judgement.py (the table of commands) and
                  test_docs_run.py (the lines of the pages) make, a hash over the tensors whose names end
                  alike, `N` for numbers: of their names, types, shapes and bytes. Where floating-point
                  code of torch made the source or the result, of names, types and shapes alone: `~`.
    api.txt       the names of qconvert.api with their signatures and fields
    commands.txt  options and arguments of each command, and what it says and returns without them
    findings.txt  what validation says of each broken repo of the corpus

`python tests/golden.py` writes all of it anew (5 minutes); `python tests/golden.py api.txt` one file.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from checkpoints import read_tensors

_FOLDER = Path(__file__).parent / "golden"
_VARIABLE = "QCONVERT_UPDATE_GOLDEN"
# The tests that ask for sections of a file, and words of their names.
_MADE_BY = {
    "outputs.txt": (
        "test_mutants.py test_judgement.py test_docs_run.py test_mutants_calibrated.py",
        "right_lines_have_no or publishes_what or lines_of_a_page",
    ),
    "api.txt": ("test_api.py", "signatures"),
    "commands.txt": ("test_cli.py", "snapshot"),
    "findings.txt": ("test_corpus.py", "finds_its_broken"),
}


def same(file: str, section: str, lines: Iterable[str]) -> None:
    """Compare the lines with those of a section, or write them there. Raises AssertionError."""
    found = tuple(line.rstrip() for text in lines for line in text.splitlines() if line.strip())
    if os.environ.get(_VARIABLE):
        _written(file, {**_read(file), section: found})
        return
    told = f"{file}, `{section}`: if it is meant to change, run python tests/golden.py {file}"
    assert found == sections(file).get(section, ()), told


def same_tensors(case: str, *folders: Path, exact: bool = True) -> None:
    """Compare the tensors of the folders, and what lies below them, with a section of outputs.txt."""
    same("outputs.txt", case, _kinds(folders, exact=exact))


@cache
def sections(file: str) -> Mapping[str, tuple[str, ...]]:
    """All of a file."""
    return _read(file)


def shown(text: str, *rooms: Path) -> str:
    """A message without the names of the folders where the test ran."""
    for room in rooms:
        text = text.replace(f"{room}/", "").replace(str(room), ".")
    return text


def _kinds(folders: Iterable[Path], *, exact: bool) -> list[str]:
    kinds: dict[str, list[str]] = defaultdict(list)
    for number, folder in enumerate(folders):
        for home in sorted({file.parent for file in folder.rglob("*.safetensors")}):
            at = home.relative_to(folder)
            if ".qconvert" in at.parts:
                continue
            for name, (dtype, shape, data) in sorted(read_tensors(home).items()):
                content = hashlib.blake2b(data).hexdigest() if exact else ""
                told = f"{number} {at.as_posix()} {name} {dtype} {shape} {content}"
                kinds[re.sub(r"\d+", "N", ".".join(name.split(".")[-2:]))].append(told)
    return [
        f"{kind} {'' if exact else '~'}{hashlib.blake2b('|'.join(all_of).encode()).hexdigest()[:8]}"
        for kind, all_of in sorted(kinds.items())
    ]


def _read(file: str) -> dict[str, tuple[str, ...]]:
    path, found = _FOLDER / file, dict[str, tuple[str, ...]]()
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for block in re.split(r"^(?=\S)", text, flags=re.MULTILINE)[1:]:
        head, *lines = block.splitlines()
        found[head] = tuple(line.removeprefix("  ") for line in lines)
    return found


def _written(file: str, found: Mapping[str, Iterable[str]]) -> None:
    blocks = ("\n  ".join((head, *found[head])) for head in sorted(found))
    (_FOLDER / file).write_text("\n".join(blocks) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for wanted in sys.argv[1:] or _MADE_BY:
        path = _FOLDER / wanted
        before = path.read_bytes()
        path.unlink()
        modules, names = _MADE_BY[wanted]
        tests = [str(Path(__file__).with_name(module)) for module in modules.split()]
        command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-k", names, *tests]
        done = subprocess.run(command, env={**os.environ, _VARIABLE: "1"}, check=False)
        if done.returncode:  # a part of the file would look like a change
            path.write_bytes(before)
            sys.exit(f"{wanted} is as it was: a test that writes it failed")
