"""The real client against a loopback Hub, whatever the environment says: HF_HUB_OFFLINE is for the
network, and no test leaves this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import tree
from loopback_hub import TOKEN, LoopbackHub, loopback_hub

# Read when the client is imported: the environment comes too late for this process, and is what worker
# processes read.
FIRST_READ = 16 << 10  # of a shard, for its header
SAMPLES, _BLOCK = 16, 4096
_SETTINGS = {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}


@contextmanager
def client_of(
    hub: LoopbackHub, folder: Path, patch: pytest.MonkeyPatch, token: str | None = TOKEN
) -> Iterator[list[float]]:
    """This process's client talks to that Hub, with a cache and no stored token in `folder`. Yields
    the seconds it, or qconvert, would have waited: nobody really does."""
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session  # type: ignore[attr-defined]

    waits: list[float] = []
    clock = SimpleNamespace(sleep=waits.append, monotonic=time.monotonic, time=time.time)
    for name, value in _SETTINGS.items():
        patch.setattr(constants, name, value)
        patch.setenv(name, str(int(value)))
    patch.setattr(constants, "ENDPOINT", hub.url)
    patch.setenv("HF_ENDPOINT", hub.url)
    pages = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", pages)
    patch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    patch.setenv("HF_HUB_CACHE", str(folder / "cache"))
    patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        patch.delenv(name, raising=False)
    if token is not None:
        patch.setenv("HF_TOKEN", token)
    patch.setattr("huggingface_hub.utils._http.time", clock)
    patch.setattr("qconvert.client.retries.time", clock)
    close_session()
    try:
        yield waits
    finally:
        close_session()


@contextmanager
def hub_and_client(folder: Path) -> Iterator[tuple[LoopbackHub, list[float]]]:
    """A Hub of one's own, and this process's client talking to it."""
    with (
        pytest.MonkeyPatch.context() as patch,
        loopback_hub() as hub,
        client_of(hub, folder, patch) as waits,
    ):
        hub.waits = waits
        yield hub, waits


def files_in(folder: Path) -> dict[str, bytes]:
    """Of a folder, as a repo has them."""
    return {name: data for name, data in tree(folder).items() if isinstance(data, bytes)}


def size_of_samples(folder: Path) -> int:
    """Bytes that are read of shards to tell two fine-tunes of one base apart."""
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    return sum(
        min(_BLOCK, size - at)
        for size in sizes
        for at in range(0, size, max(_BLOCK, size // SAMPLES))
    )


def on_disk(place: Path) -> int:
    """Bytes that files below a folder take; holes take none."""
    total = 0
    for folder, _, names in os.walk(place):
        for name in names:
            with suppress(FileNotFoundError):  # it was renamed meanwhile
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total
