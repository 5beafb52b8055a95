"""What was imported for all tests is left out of garbage collections: with torch and transformers it is
millions of objects, and each collection of a test that makes many would look at all of them.
Properties have no deadline: how long an example takes says more of the machine than of the code."""

from __future__ import annotations

import gc

from hypothesis import settings

settings.register_profile("qconvert", deadline=None)
settings.load_profile("qconvert")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
