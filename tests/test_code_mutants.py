"""Wrong lines of the code that plans, runs, and judges: each is killed by the test that is named for it.

code_mutants.txt has a section for each of these tests and in it its mutants, a line each:

    MODULE PLACE: `OLD` -> `NEW`

as in mutants.py. The tests of a file share a process, which runs them first with the right lines, and a
fork of it for each mutant. `python tests/test_code_mutants.py test_disk.py` runs those of a file.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import golden
import pytest
from mutants import Mutant, applied, changed
from sampled import thinned

_HERE = Path(__file__).parent
_SECONDS = 120  # of a fork: some wrong lines never end
_LINE = re.compile(r"(\S+) (\S+): `(.*)` -> `(.*)`")


def _mutants() -> Mapping[str, Sequence[Mutant]]:
    """By file, those of its tests; the `case` of each is the name of its test."""
    found: list[Mutant] = []
    for test, lines in sorted(golden.sections("../code_mutants.txt").items()):
        for line in lines:
            match = _LINE.fullmatch(line)
            assert match, f"{test}: {line}: expected MODULE PLACE: `OLD` -> `NEW`"
            found.append(Mutant(line, test, *match.groups()))
    return {file: list(some) for file, some in groupby(found, lambda m: m.case.partition("::")[0])}


def test_every_mutant_stands_in_the_source() -> None:
    every = [mutant for some in _mutants().values() for mutant in some]
    assert all(changed(mutant) for mutant in every)
    assert len({mutant.name for mutant in every}) == len(every) >= 60


@pytest.mark.big
@pytest.mark.parametrize("file", thinned(_mutants(), 4))
def test_a_wrong_line_is_killed(file: str) -> None:
    done = subprocess.run([sys.executable, __file__, file], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def _code(*tests: str) -> int:
    """How pytest ends: 0 if all passed, 1 if one failed."""
    flags = ["-qx", "-pno:cacheprovider", "-pno:xdist", f"--rootdir={_HERE.parent}", "-m", ""]
    return int(pytest.main([*flags, *(str(_HERE / test) for test in tests)]))


def _survivors(mutants: Sequence[Mutant]) -> list[Mutant]:
    """Those that their tests do not notice."""
    tests = list(dict.fromkeys(mutant.case for mutant in mutants))
    told = os.dup(1)
    os.dup2(2, 1)
    assert _code(*tests) == 0, f"with the right lines too, one fails of {tests}"
    left = []
    for mutant in mutants:
        child = os.fork()
        if not child:
            signal.alarm(_SECONDS)
            try:
                with applied(mutant):
                    os._exit(_code(mutant.case))
            finally:
                os._exit(9)  # it cannot be applied
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 1:
            left.append(mutant)
    os.dup2(told, 1)
    return left


if __name__ == "__main__":
    for survivor in _survivors(_mutants()[sys.argv[1]]):
        print(f"{survivor.case} passes with {survivor.name}")
