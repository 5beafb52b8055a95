"""Ranges of the files of one commit, over many requests.

A large file's address at the Hub redirects to a signed link at another host, which lasts for some time:
it is kept and used again, so that a range takes one request, and asked for anew when it is refused. The
token goes to the Hub alone.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from qconvert.client.listing import MOST_HOPS, TIMEOUT
from qconvert.client.retries import (
    READING,
    client,
    fault_of,
    is_at,
    library,
    own_headers,
    patiently,
)
from qconvert.core.errors import CheckpointError
from qconvert.core.shown import shortened

# Kept links that were refused when they were first used again; then links are for one range each.
_MOST_MISSES = 4
_SPAN = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/(?:[0-9]+|\*)")
_LATER = "run the same command again later: finished work is kept"


class _OtherBytes(CheckpointError):
    """An answer that is not the range that was asked for."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A range of a file."""

    path: str
    start: int
    stop: int


@dataclass(slots=True)
class _Link:
    """Address that a file redirects to, and how often that has been used again."""

    url: str
    used: int = 0


@dataclass
class Ranges:
    """Reads one commit of a repo, from any number of threads of one process."""

    endpoint: str
    repo: str
    commit: str
    _links: dict[str, _Link] = field(default_factory=dict, repr=False)
    _misses: int = 0
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file. Raises CheckpointError where the file ends before, or the
        server does not answer ranges; Refused and RunError as `patiently` does."""
        asked = _Asked(path, start, stop)
        what = f"reading {self.repo}: {path}"
        return patiently(lambda: self._once(asked), what, then=_LATER, why=READING)

    def _once(self, asked: _Asked) -> bytes:
        from huggingface_hub import hf_hub_url

        link = self._links.get(asked.path)
        if link is not None and (found := self._by_link(link, asked)) is not None:
            return found
        first = hf_hub_url(self.repo, asked.path, revision=self.commit, endpoint=self.endpoint)
        url = first
        for _ in range(MOST_HOPS):
            answer = self._get(url, asked)
            if isinstance(answer, bytes):
                if not self._is_hub(url) and self._misses < _MOST_MISSES:
                    self._links[asked.path] = _Link(url)
                return answer
            url = answer
        raise CheckpointError(
            f"{self.repo}: {asked.path}: expected bytes after at most {MOST_HOPS} redirects, found one "
            "more; check HF_ENDPOINT"
        )

    def _by_link(self, link: _Link, asked: _Asked) -> bytes | None:
        """A range by a link that was kept; None where it has expired. Raises as a request does that may
        be repeated, which is then made by the file's own address."""
        from huggingface_hub.errors import HfHubHTTPError

        try:
            answer = self._get(link.url, asked)
        except (HfHubHTTPError, library().TransportError, _OtherBytes) as error:
            fault = fault_of(error)
            self._drop(link, asked, expired=fault is None or not fault.is_transient)
            if fault is not None and fault.is_transient:
                raise
            return None
        if isinstance(answer, str):  # it was moved again
            self._drop(link, asked, expired=True)
            return None
        link.used += 1
        return answer

    def _drop(self, link: _Link, asked: _Asked, *, expired: bool) -> None:
        with self._lock:
            if self._links.get(asked.path) is link:
                del self._links[asked.path]
                self._misses += expired and not link.used

    def _get(self, url: str, asked: _Asked) -> bytes | str:
        """The answer to one request: the bytes, or where else they are."""
        from huggingface_hub.utils import get_session, hf_raise_for_status  # type: ignore[attr-defined]

        headers = {"Range": f"bytes={asked.start}-{asked.stop - 1}", "Accept-Encoding": "identity"}
        if self._is_hub(url):
            headers = own_headers() | headers
        with get_session().stream(
            "GET", url, headers=headers, follow_redirects=False, timeout=TIMEOUT
        ) as answer:
            if answer.has_redirect_location:
                return str(answer.url.join(answer.headers["Location"]))
            hf_raise_for_status(answer)
            self._check(answer, asked)
            pieces, left = [], asked.stop - asked.start
            for chunk in answer.iter_raw():
                pieces.append(chunk[:left])
                left -= len(pieces[-1])
                if not left:
                    return b"".join(pieces)
            raise library().RemoteProtocolError(
                f"the answer ends {left} bytes early", request=answer.request
            )

    def _check(self, answer: Any, asked: _Asked) -> None:
        """Raise CheckpointError for an answer with other bytes than those that were asked for: what is
        taken for a tensor must be its bytes."""
        where = f"{self.repo}: {asked.path}"
        wanted = asked.start, asked.stop - 1
        # Of an answer that is the whole file its start is taken, and no more is read.
        if answer.status_code != 206 and asked.start:
            raise _OtherBytes(
                f"{where}: expected bytes {wanted[0]} to {wanted[1]}, found the whole file: the server "
                f"does not answer ranges; run hf download {self.repo}, and name it again"
            )
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise _OtherBytes(
                f"{where}: is sent compressed, which was not asked for; check HF_ENDPOINT"
            )
        if answer.status_code != 206:
            return
        span = _SPAN.fullmatch(answer.headers.get("Content-Range", ""))
        if span is None or (int(span[1]), int(span[2])) != wanted:
            raise _OtherBytes(
                f"{where}: expected bytes {wanted[0]} to {wanted[1]}, found "
                f"{shortened(answer.headers.get('Content-Range', 'no Content-Range'), 80)}; the file is "
                "shorter than the Hub lists it, or a proxy changes answers"
            )

    def _is_hub(self, url: str) -> bool:
        return is_at(self.endpoint, url)


@lru_cache(maxsize=64)
def ranges_of(endpoint: str, repo: str, commit: str) -> Ranges:
    """The one reader that a process has of a commit, with the links that it found."""
    client()  # no secret of an endpoint in its warnings
    return Ranges(endpoint, repo, commit)
