"""A Hub that lies, or a proxy in its place: whatever it answers, a command ends with one clear error,
takes no more memory than a sound answer needs, and shows the token to nobody else."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Result, bf16_moe, run_cli, tensor
from hub_client import files_in, hub_and_client
from loopback_hub import TOKEN, LoopbackHub, _Handler
from sampled import sampled

REPO = "org/model"
# What is answered, in place of a status, a body and headers.
Answer = tuple[int, Any, Mapping[str, str]]
Lie = Callable[[int, Any, Mapping[str, str]], Answer]

READERS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect", REPO),
    "validate": ("validate", REPO, "--level", "headers"),
    "repair": ("repair", REPO, "--dry-run"),
    "copy": ("run", "copy", REPO, "{out}", "--jobs", "1"),
    "plan": ("plan", "copy", REPO, "--jobs", "1"),
    "diff": ("diff", f"hf://{REPO}", "{here}"),
    "report": ("report", REPO),
    "advise": ("advise", REPO, "--for", "sglang"),
}
SENDERS: dict[str, tuple[str, ...]] = {
    "upload": ("upload", "{here}", REPO, "--level", "headers"),
    "clean": ("clean", f"hf://{REPO}"),
}


def _body(value: Any) -> Lie:
    """JSON of another kind; bytes are sent as they are."""
    return lambda status, body, headers: (status, value, headers)


def _raw(data: bytes) -> Lie:
    return lambda status, body, headers: (200, data, headers)


def _headers(**more: str) -> Lie:
    names = {name.replace("_", "-"): value for name, value in more.items()}
    return lambda status, body, headers: (status, body, {**headers, **names})


def _status(status: int, **more: str) -> Lie:
    names = {name.replace("_", "-"): value for name, value in more.items()}
    return lambda _, body, headers: (status, b"", {**headers, **names})


def _entry(**changes: Any) -> Lie:
    """Each file listed with other fields; `...` leaves one out."""

    def lie(status: int, body: Any, headers: Mapping[str, str]) -> Answer:
        return status, [_changed(entry, changes) for entry in body], headers

    return lie


def _changed(entry: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**entry, **changes}.items() if value is not ...}


def _lfs(**changes: Any) -> Lie:
    def lie(status: int, body: Any, headers: Mapping[str, str]) -> Answer:
        made = [{**e, "lfs": _changed(e["lfs"], changes)} if "lfs" in e else e for e in body]
        return status, made, headers

    return lie


_HUGE = 10**30
_JSON: dict[str, Lie] = {
    "null": _body(None),
    "a number": _body(7),
    "a text": _body("yes"),
    "true": _body(True),
    "a list of a list": _body([[]]),
    "a list of null": _body([None]),
    "a list of numbers": _body([1, 2]),
    "an empty object": _body({}),
    "an object of lists": _body({"sha": [], "siblings": 3}),
    "no JSON": _raw(b"<html>login</html>"),
    "half of it": _raw(b'[{"type": "file", "pa'),
    "no text": _raw(b"\xff\xfe\x00\xd8"),
    "a surrogate": _raw(
        b'[{"type": "file", "path": "\\ud800", "size": 1, "oid": "' + b"0" * 40 + b'"}]'
    ),
    "nested deep": _raw(b"[" * 200_000),
    "a long number": _raw(b"[" + b"9" * 6000 + b"]"),
    "nothing": _raw(b""),
    "a status that is none": _status(299),
    "an error without a text": _status(404),
    "an error with a text of bytes": _status(403, X_Error_Message="\xe9\xff"),
    "a rate limit of thousands of digits": _status(429, RateLimit='"api";r=0;t=' + "9" * 5000),
    "a wait below zero": _status(503, Retry_After="-5"),
    "a wait that is none": _status(503, Retry_After="nan"),
    "redirects in a circle": _status(302, Location="?again"),
    "redirects to nothing": _status(302, Location="http://[::1"),
    "redirects to a file": _status(302, Location="file:///etc/passwd"),
    "says that it is compressed": _headers(Content_Encoding="gzip"),
    "longer than it says": _headers(Content_Length="3"),
    "a length that is none": _headers(Content_Length="many"),
}
_INFO: dict[str, Lie] = {
    **_JSON,
    "a list": _body([]),
    "no commit": _body({"id": REPO}),
    "a commit of a number": _body({"id": REPO, "sha": 5}),
    "a commit of a name": _body({"id": REPO, "sha": "main"}),
    "a commit that leads out": _body({"id": REPO, "sha": "../../evil"}),
    "a commit in capitals": _body({"id": REPO, "sha": "A" * 40}),
}
_TREE: dict[str, Lie] = {
    **_JSON,
    "no files": _body([]),
    "no path": _entry(path=...),
    "a path of a number": _entry(path=3),
    "all of one path": _entry(path="config.json"),
    "a path that leads out": _entry(path="../evil"),
    "an empty path": _entry(path=""),
    "a path with a zero": _entry(path="a\0b"),
    "a path too long": _entry(path="a" * 5000),
    "no size": _entry(size=...),
    "a size below zero": _entry(size=-1),
    "a size in words": _entry(size="12"),
    "a huge size": _entry(size=_HUGE),
    "a size of a fraction": _entry(size=1.5),
    "no hash": _entry(oid=...),
    "a hash of a number": _entry(oid=1),
    "a hash that leads out": _entry(oid="../x"),
    "no kind": _entry(type=...),
    "another kind": _entry(type="link"),
    "a large file of text": _entry(lfs="yes"),
    "a large file of a list": _entry(lfs=[]),
    "a large file without a size": _lfs(size=...),
    "a large file of a huge size": _lfs(size=_HUGE),
    "a large file without a hash": _lfs(oid=...),
    "a page at another host": _headers(Link='<{elsewhere}/more>; rel="next"'),
    "a page that is itself": _headers(Link='<{hub}{path}>; rel="next"'),
    "a page that is no address": _headers(Link='<http://[x>; rel="next"'),
    "a page of a file": _headers(Link='<file:///etc/passwd>; rel="next"'),
}  # fmt: skip
_FILE: dict[str, Lie] = {
    "nothing": _raw(b""),
    "another range": _headers(Content_Range="bytes 5-9/100"),
    "a range that is none": _headers(Content_Range="bytes */x"),
    "a range of thousands of digits": _headers(Content_Range="bytes 0-" + "9" * 5000 + "/*"),
    "says that it is compressed": _headers(Content_Encoding="gzip"),
    "a length that is none": _headers(Content_Length="-3"),
    "redirects in a circle": _status(302, Location="?again"),
    "redirects to nothing": _status(302, Location="http://[::1"),
    "redirects to a file": _status(302, Location="file:///etc/passwd"),
    "not found": _status(404),
    "not allowed": _status(403),
    "a status that is none": _status(299),
}
_PLACES: dict[str, tuple[str, dict[str, Lie]]] = {
    "the repo": (r"/api/models/org/model", _INFO),
    "its files": (r"/tree/", _TREE),
    "a file": (r"/resolve/|/cdn/", _FILE),
    "its branches": (r"/refs", _JSON),
}


@contextmanager
def _elsewhere() -> Iterator[tuple[str, list[str]]]:
    """Another host, and the tokens that it was shown."""
    seen: list[str] = []

    class Listener(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization") or "")
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"[]")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Listener) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", seen
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bf16_moe().write(tmp_path_factory.mktemp("lying") / "model")


@pytest.fixture
def hub(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with hub_and_client(tmp_path / "home") as (server, _):
        server.add(REPO, files_in(here))
        yield server


def _told(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, pattern: str, lie: Lie, elsewhere: str = ""
) -> None:
    """Answers of one kind are lies from now on."""
    answer = _Handler._answer

    def wrong(self: _Handler, status: int, body: Any = b"", headers: Any = None) -> None:
        headers = headers or {}
        path = self.path.partition("?")[0]
        other = pattern == "/api/models/org/model" and ("/tree/" in path or "/refs" in path)
        if status in (200, 206) and re.search(pattern, path) and not other:
            status, body, headers = lie(status, body, headers)
            filled = {"elsewhere": elsewhere, "hub": hub.url, "path": self.path}
            headers = {
                name: value.format(**filled) if "{" in value else value
                for name, value in headers.items()
            }
        answer(self, status, body, headers)

    monkeypatch.setattr(_Handler, "_answer", wrong)


def _run(words: tuple[str, ...], here: Path, tmp_path: Path) -> Result:
    places = {"out": str(tmp_path / "out"), "here": str(here)}
    return run_cli(*(word.format(**places) for word in words))


# What a command does not ask for, it cannot be told wrong.
_ASKS: dict[str, tuple[str, ...]] = {
    "the repo": (*(name for name in READERS if name != "diff"), "upload"),
    "its files": (*READERS, "upload"),
    "a file": tuple(name for name in READERS if name != "diff"),
    "its branches": ("clean",),
}
_LIES = [
    (place, lie, command)
    for place, (_, lies) in _PLACES.items()
    for lie in lies
    for command in _ASKS[place]
]


@pytest.mark.parametrize("case", sampled(_LIES, 40, name="-".join))
def test_an_answer_that_is_a_lie(
    case: tuple[str, str, str],
    hub: LoopbackHub,
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place, what, command = case
    pattern, lies = _PLACES[place]
    with _elsewhere() as (url, seen):
        _told(hub, monkeypatch, pattern, lies[what], url)
        result = _run((READERS | SENDERS)[command], here, tmp_path)
    assert TOKEN not in "".join(seen), "the token went to another host"
    said = result.err + capsys.readouterr().err
    assert "Traceback" not in said
    assert TOKEN not in said + result.out
    assert all(0 <= wait <= 300 for wait in hub.waits)
    assert not list(tmp_path.rglob("*evil*"))
    # The client sends again what it doubts; a repo that is not there has nothing to clean.
    if command in SENDERS and result.code == 0:
        return
    assert result.code in (1, 3), said
    errors = [line for line in said.splitlines() if ": error: " in line]
    assert len(errors) == 1 or result.code == 3, said
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("command", ["inspect", "diff", "copy"])
@pytest.mark.parametrize("how", ["pages without end", "one long page"])
def test_a_list_without_end(
    how: str,
    command: str,
    hub: LoopbackHub,
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One reader for all commands: each stops where no repo is that long."""
    numbers = count()

    def pages(status: int, body: Any, headers: Mapping[str, str]) -> Answer:
        page = [
            {"type": "file", "path": f"{next(numbers)}", "size": 1, "oid": "0" * 40}
            for _ in range(20)
        ]
        return 200, page, {**headers, "Link": '<{hub}{path}>; rel="next"'}

    monkeypatch.setattr("qconvert.client.listing._MOST_FILES", 100)
    monkeypatch.setattr("qconvert.client.listing._MOST_ANSWER", 4096)
    long = _raw(b"[" + b" " * 5000 + b"]")
    _told(hub, monkeypatch, "/tree/", pages if how.startswith("pages") else long)
    result = _run(READERS[command], here, tmp_path)
    assert result.code == 1
    assert "expected at most 100 files" in result.err or "at most 4096 bytes" in result.err
    assert len(hub.asked("GET", "/tree/")) < 10
    assert hub.waits == []


@pytest.mark.parametrize("command", ["inspect", "validate", "copy"])
def test_headers_together_have_a_limit(
    command: str,
    hub: LoopbackHub,
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each shard may claim one of 100 MB, and a repo may list thousands."""
    model = bf16_moe()
    model.tensors |= {f"model.layers.0.extra.{i}.weight": tensor("BF16", 4) for i in range(300)}
    files = files_in(model.write(tmp_path / "long", shards=2))
    hub.add(REPO, files)
    small = sum(len(data) for name, data in files.items() if not name.endswith("tensors"))
    monkeypatch.setattr("qconvert.checkpoint.mirror._MOST_TOGETHER", small)
    result = _run(READERS[command], here, tmp_path)
    assert result.code == 1
    assert "of headers, found more" in result.err


def test_a_page_at_another_host_is_not_asked(
    hub: LoopbackHub, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _elsewhere() as (url, seen):
        _told(hub, monkeypatch, "/tree/", _TREE["a page at another host"], url)
        for command in ("inspect", "copy", "diff", "upload"):
            result = _run((READERS | SENDERS)[command], here, tmp_path)
            assert result.code == 1
            assert "sends on to another host" in result.err
    assert seen == []


def test_a_repo_that_was_renamed(hub: LoopbackHub, here: Path, tmp_path: Path) -> None:
    """The Hub redirects to its new name, at the same host."""
    answer = _Handler._answer

    def moved(self: _Handler, status: int, body: Any = b"", headers: Any = None) -> None:
        if "/org/old" in self.path and status == 404:
            to = self.path.replace("/org/old", "/org/model")
            status, body, headers = 307, b"", {"Location": to}
        answer(self, status, body, headers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Handler, "_answer", moved)
        assert run_cli("inspect", "org/old").code == 0
        assert run_cli("run", "copy", "org/old", tmp_path / "out", "--jobs", "1").code == 0
