"""What was imported for all tests is left out of garbage collections: with torch and transformers it is
millions of objects, and each collection of a test that makes many would look at all of them."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
