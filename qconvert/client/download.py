"""Bytes of a repo's files, by range, straight from the Hub: nothing goes into the client's cache."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qconvert.client.retries import patiently, without_userinfo
from qconvert.core.errors import CheckpointError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_CHUNK = 1 << 20
_TIMEOUT = 30.0


class _WithoutUserinfo(logging.Filter):
    """Takes secrets out of the URLs that the client names in warnings when it retries."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = without_userinfo(record.getMessage()), ()
        return True


_FILTER = _WithoutUserinfo()


def client() -> HfApi:
    """The client, which knows from the environment where the Hub is and with which token."""
    from huggingface_hub import HfApi

    from qconvert import __version__

    logging.getLogger("huggingface_hub.utils._http").addFilter(
        _FILTER
    )  # adding it twice adds it once
    return HfApi(library_name="qconvert", library_version=__version__)


@dataclass
class Reader:
    """Reads one commit of a repo, from any number of threads. `nbytes` and `requests` count what the
    bodies of answers held, retries included."""

    api: HfApi
    repo: str
    commit: str
    nbytes: int = 0
    requests: int = 0
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file. Raises CheckpointError where it ends before, Refused and
        RunError as `patiently` does."""
        if stop <= start:
            return b""

        def once() -> bytes:
            data = bytearray()
            for chunk in self._stream(path, start, stop):
                data += chunk
            return bytes(data)

        data = patiently(once, f"reading {self.repo}: {path}")
        if len(data) != stop - start:
            raise CheckpointError(
                f"{self.repo}: {path}: expected bytes {start} to {stop}, found {len(data)} of them; the "
                "file is shorter than the Hub lists it"
            )
        return data

    def chunks(self, path: str, size: int) -> Iterator[bytes]:
        """A whole file, a piece at a time, one request a piece so that any can be repeated."""
        step = 64 * _CHUNK
        for start in range(0, size, step):
            yield self.read(path, start, min(size, start + step))

    def _stream(self, path: str, start: int, stop: int) -> Iterator[bytes]:
        """The answer to one request, cut at what was asked for: not every server knows ranges."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

        from qconvert import __version__

        url = hf_hub_url(self.repo, path, revision=self.commit, endpoint=self.api.endpoint)
        headers = build_hf_headers(library_name="qconvert", library_version=__version__)
        headers |= {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        with get_session().stream(
            "GET", url, headers=headers, follow_redirects=True, timeout=_TIMEOUT
        ) as answer:
            self._count(0)
            hf_raise_for_status(answer)
            if start and answer.status_code != 206:
                raise CheckpointError(
                    f"{self.repo}: {path}: the server does not support byte ranges; run hf download "
                    f"{self.repo}, and name the folder"
                )
            left = stop - start
            for chunk in answer.iter_bytes(_CHUNK):
                self._count(len(chunk), requests=0)
                yield chunk[:left]
                left -= len(chunk)
                if left <= 0:
                    return

    def _count(self, nbytes: int, requests: int = 1) -> None:
        with self._lock:
            self.nbytes += nbytes
            self.requests += requests
