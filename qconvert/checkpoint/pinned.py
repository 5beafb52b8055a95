"""The commits that a command reads of repos on the Hub. Apart from their store (hub_store.py), whose
client a command on a folder does not need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qconvert.checkpoint.hub_cache import Repo

PINNED: ContextVar[dict[Repo, str] | None] = ContextVar("pinned", default=None)


@contextmanager
def pinned() -> Iterator[None]:
    """Within this a revision stands for the commit that it stood for when it was first asked for: a
    command reads one commit, whatever happens to the branch."""
    if PINNED.get() is not None:
        yield
        return
    token = PINNED.set({})
    try:
        yield
    finally:
        PINNED.reset(token)
