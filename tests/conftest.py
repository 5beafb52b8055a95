"""What a test computes in its own process is computed in both forms of each op (both_forms.py).
What was imported for all tests is left out of garbage collections: with torch and transformers it is
millions of objects, and each collection of a test that makes many would look at all of them.
What is written is not forced onto the disk: those that cut the power record what would be lost
(tests/crash/test_powercut.py), and the 36 syncs of a conversion's test take as long as all it computes.
Products of BF16 are made as torch makes them, whatever the CPU: results are compared with transformers'
own to the last digits (tests/test_bf16_products.py is about the other way).
Properties have no deadline: how long an example takes says more of the machine than of the code.
Ctrl-C has its usual effect in processes that tests start: a shell that runs the tests in the
background has had it ignored. How often processes were killed is said at the end, by file."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections import Counter
from functools import wraps
from typing import Any

import both_forms
import made_once
import pytest
from hypothesis import settings

from qconvert.calibrate import kernel_choice

settings.register_profile("qconvert", deadline=None)
settings.load_profile("qconvert")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Descriptions of classes and compiled loops are kept, and not among the user's own: made once for
    all of xdist's processes, which have the environment of the one that starts them, and for all runs
    with one QCONVERT_TEST_CACHE. What made_once.py makes is kept for this run alone."""
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        patch = pytest.MonkeyPatch()
        patch.setenv("XDG_CACHE_HOME", os.environ.get("QCONVERT_TEST_CACHE") or folder.name)
        patch.setenv(made_once.VARIABLE, folder.name)
        config.add_cleanup(patch.undo)
    here = pytest.MonkeyPatch()
    config.add_cleanup(here.undo)
    both_forms.begin(here)
    decides: Any = kernel_choice.bf16_is_slow
    here.setattr(kernel_choice, "bf16_is_slow", wraps(decides.__wrapped__)(lambda: False))
    for sync in ("fsync", "fdatasync"):
        here.setattr(os, sync, _not_synced)


def _not_synced(fd: int) -> None:
    """As the system's call, which refuses a descriptor that is closed."""
    os.fstat(fd)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    killed = getattr(sys.modules.get("faults"), "deaths", [])
    item.user_properties += [("killed", len(killed))] if killed else []
    killed.clear()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found: Counter[str] = Counter()
    for report in terminalreporter.stats.get("", []):
        if report.when == "teardown":
            found[report.nodeid.partition("::")[0]] += dict(report.user_properties).get("killed", 0)
    for file, count in sorted((+found).items()):
        terminalreporter.write_line(f"{count:5} kills in {file}")
