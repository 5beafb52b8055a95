"""What was imported for all tests is left out of garbage collections: with torch and transformers it is
millions of objects, and each collection of a test that makes many would look at all of them.
Properties have no deadline: how long an example takes says more of the machine than of the code.
Ctrl-C has its usual effect in processes that tests start: a shell that runs the tests in the
background has had it ignored."""

from __future__ import annotations

import gc
import signal
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("qconvert", deadline=None)
settings.load_profile("qconvert")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _own_cache() -> Iterator[None]:
    """Descriptions of classes are kept, and not among the user's own."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        yield
