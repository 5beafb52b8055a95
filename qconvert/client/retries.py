"""Failures of requests: which are transient, and which stop an upload at once.

huggingface_hub retries some requests by itself (preupload, LFS batch, PUT) and not others
(creating a repo, commits, listings). A wrong token, a missing permission or a file that is too large
fails however often one retries: users lost hours to clients that kept retrying.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from qconvert.core.errors import OutputError, QConvertError, RunError
from qconvert.core.say import say
from qconvert.core.shown import shortened

if TYPE_CHECKING:
    from huggingface_hub import HfApi


_BASE = "HTTPError"  # what huggingface_hub.errors.HfHubHTTPError derives from, in either


@cache
def library() -> ModuleType:
    """httpx or httpx2, whichever the installed client raises the errors of."""
    from huggingface_hub.errors import HfHubHTTPError

    (base,) = (found for found in HfHubHTTPError.__mro__ if found.__name__ == _BASE)
    return sys.modules[base.__module__.partition(".")[0]]


def own_headers() -> dict[str, str]:
    """Return what the Hub itself is told, with the token."""
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    from qconvert import __version__

    found: dict[str, str] = build_hf_headers(library_name="qconvert", library_version=__version__)
    return found


def is_at(endpoint: str, url: str) -> bool:
    """Return whether an address is at an endpoint: scheme, host and port, which is what a token is
    for."""
    return _place(url) == _place(endpoint)


def _place(url: str) -> tuple[str, str | None, int | None] | None:
    """None for what is no address."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"https": 443, "http": 80}.get(parts.scheme)
    except ValueError:
        return None
    return parts.scheme, parts.hostname, port


T = TypeVar("T")
Say = Callable[[str], None]

TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
# With these the Hub has certainly not carried a request out.
_NOT_DONE = frozenset({408, 429, 503})
TRIES = 6
_LONGEST = 60.0
# Seconds; the longest wait that the Hub asks for and gets. It may ask for hours.
MOST_ASKED = 300.0
WRITING: Mapping[int, str] = {
    401: "log in with `hf auth login`, or set HF_TOKEN to a token that is valid",
    403: "the token lacks permission; use one with write access to the repo",
    404: "it does not exist, or the token has no access to it",
    413: "the file is too large for the Hub; convert again with a smaller --max-shard-size",
}
# Of a repo that is read. The Hub says 401 of a name that nobody has, too.
READING: Mapping[int, str] = {
    401: "check its name; for a private or gated repo log in with `hf auth login`, or set HF_TOKEN",
    403: "the token has no access; to a gated repo ask for it on its page, with the token's account",
    404: "check its name and revision; the token may have no access to it",
}
_STUMBLES = (TypeError, AttributeError, IndexError, RecursionError, ArithmeticError, AssertionError)
_USERINFO = re.compile(r"(?<=://)[^/\s@]*@")


def without_userinfo(text: str) -> str:
    """A text whose URLs have lost `user:password@`: HF_ENDPOINT may hold a secret."""
    return _USERINFO.sub("", text)


def to_stderr(text: str) -> None:
    say(text, err=True)


class HubRefused(OutputError):
    """The Hub refused a request, and would again. `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a request failed. `status` None: there was no answer. `path` is the URL's, without its
    query, which may hold a signature; `wait` the seconds the Hub asks for."""

    status: int | None
    path: str
    said: str
    wait: float | None = None

    @property
    def is_transient(self) -> bool:
        return self.status is None or self.status in TRANSIENT

    def __str__(self) -> str:
        what = "no answer" if self.status is None else f"status {self.status}"
        said = without_userinfo(self.said)
        return f"{what} from {self.path}" + (f": {said}" if said else "")


def fault_of(error: BaseException) -> Fault | None:
    """Return what went wrong with a request, found in the chain of causes (the client wraps failures of
    LFS uploads in RuntimeError). None for errors that are not a request's."""
    http = library()
    for cause in _causes(error):
        if isinstance(cause, json.JSONDecodeError):
            # The client decodes some answers before it looks at their status; a proxy's are pages.
            return Fault(None, "the Hub", "its answer is not JSON")
        response = getattr(cause, "response", None)
        if isinstance(response, http.Response):
            said = getattr(cause, "server_message", None) or ""
            return Fault(
                response.status_code, _path(response), " ".join(said.split()), _wait(response)
            )
        if isinstance(cause, http.TransportError):
            return Fault(None, _path(cause), str(cause) or type(cause).__name__)
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _path(asked: object) -> str:
    """The path of an answer's request, or of one that failed; the client's own errors have none."""
    try:
        url = asked.request.url  # type: ignore[attr-defined]
    except RuntimeError:  # httpx: no request was set
        return "the Hub"
    return str(url.path)


def _wait(response: object) -> float | None:
    """Seconds that Retry-After, or the Hub's rate limit, asks for."""
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

    headers = response.headers  # type: ignore[attr-defined]
    try:
        limit = parse_ratelimit_headers(headers)
        if limit is not None and limit.remaining == 0:
            return max(0.0, float(limit.reset_in_seconds))
        return max(0.0, float(headers.get("Retry-After", "")))
    except (ValueError, OverflowError):  # none, or a date, or thousands of digits
        return None


def patiently(
    call: Callable[[], T],
    what: str,
    *,
    say: Say = to_stderr,
    once: str | None = None,
    then: str = "try again later",
    why: Mapping[int, str] = WRITING,
) -> T:
    """Call until it succeeds: up to TRIES times, waiting 1, 2, 4, ... seconds or what the Hub asks for,
    MOST_ASKED at most; `say` gets a line for each retry.

    `what` names the request in errors. `once` is part of the path of a request that must not be
    carried out twice: where it may have been, it is not retried. `then` tells the user what to do after
    the last try, `why` what to do about a status that is not retried. Raises Refused for failures that
    are not transient, RunError after the last try.
    """
    for number in range(1, TRIES + 1):
        try:
            return call()
        except QConvertError:
            raise
        except Exception as error:
            fault = fault_of(error)
            if fault is None:
                raise _translated(error, what) from error
            if not fault.is_transient:
                raise HubRefused(fault.status or 0, _refusal(fault, what, why)) from error
            if once is not None and once in fault.path and fault.status not in _NOT_DONE:
                raise RunError(
                    f"{what}: {fault}; the Hub may have carried it out: look at the repo, and if a pull "
                    "request was opened, continue with --revision refs/pr/NUMBER"
                ) from error
            if number == TRIES:
                raise RunError(f"{what}: {fault}, {TRIES} times; {then}") from error
            asked = fault.wait
            wait = min(_LONGEST, 2.0 ** (number - 1)) if asked is None else min(MOST_ASKED, asked)
            say(f"{what}: {fault}; retrying in {wait:.0f} s")
            time.sleep(wait)
    raise AssertionError("the last try returns or raises")


def _translated(error: Exception, what: str) -> Exception:
    """Errors of the client that the user can fix, as qconvert's; any other as it is."""
    from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return RunError(f"{what}: HF_HUB_OFFLINE is set; unset it to reach the Hub")
    if isinstance(error, LocalTokenNotFoundError):
        return OutputError(f"{what}: found no token; run `hf auth login`, or set HF_TOKEN")
    if isinstance(error, ValueError):  # README.md's front matter, an LFS object it will not take
        return OutputError(f"{what}: {without_userinfo(' '.join(str(error).split()))}")
    if isinstance(error, RuntimeError):  # hf_xet's own failures have no other type
        return RunError(f"{what}: {without_userinfo(' '.join(str(error).split()))}")
    if isinstance(error, KeyError):  # the client does not check that a key is in an answer
        return RunError(f"{what}: the answer lacks {error}, so no Hub sent it; check HF_ENDPOINT")
    http = library()
    if isinstance(error, http.HTTPError | http.InvalidURL | http.StreamError) or _in_client(error):
        said = " ".join(str(error).split())
        return RunError(
            f"{what}: the answer is not one of a Hub ({type(error).__name__}: "
            f"{shortened(without_userinfo(said), 200)}); check HF_ENDPOINT"
        )
    return error


def _in_client(error: Exception) -> bool:
    """Return whether the client itself stumbled: it takes an answer for what the Hub sends."""
    step, names = error.__traceback__, []
    while step is not None:
        names.append(str(step.tb_frame.f_globals.get("__name__", "")).partition(".")[0])
        step = step.tb_next
    return isinstance(error, _STUMBLES) and "huggingface_hub" in names


def _refusal(fault: Fault, what: str, why: Mapping[int, str]) -> str:
    return f"{what}: {fault}; {why.get(fault.status or 0, 'a retry would not help')}"


# huggingface_hub's client, as this package uses it.


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
