"""A Hub on this machine's loopback, for the real client: standard library, in a thread.

It keeps repos, commits, branches, pull requests, LFS objects; lists trees in pages; serves files
with ranges, large ones through a redirect to another host name, as the Hub does. `fail` and `cut`
break requests on purpose; `log` has every request with the bytes that went each way. What it
answers was read in huggingface_hub 1.33 (hf_api.py, _commit_api.py, lfs.py, file_download.py).
"""

from __future__ import annotations

import base64
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from mmap import mmap
from typing import Any, cast
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_loopbackSECRETtoken"
_PACED = 256 << 10
_AHEAD = 0.003
_BUFFERED = 0.05  # seconds of traffic that buffers on a way hold
_RELATIONS = ("adapter", "merge", "quantized", "finetune")


@dataclass(frozen=True)
class Blob:
    """A file of a commit: its bytes as the server has them, and the sha256 an LFS file was committed
    under (None: a file of git's own)."""

    data: bytes
    lfs: str | None

    @property
    def oid(self) -> str:
        """Of git: of the content, or of the pointer that stands for it."""
        body = self.data
        if self.lfs is not None:
            body = f"version 1\noid sha256:{self.lfs}\nsize {len(self.data)}\n".encode()
        return sha1(b"blob %d\0" % len(body) + body).hexdigest()


@dataclass
class Repo:
    """Branches and pull requests by name, each a commit's id; commits by id, each a tree."""

    private: bool
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    pull_requests: int = 0

    def tree(self, revision: str = "main") -> dict[str, Blob]:
        return self.commits[self.refs.get(revision, revision)]

    def commit(self, ref: str, tree: dict[str, Blob], message: str) -> str:
        spelled = f"{ref}{len(self.commits)}{[(p, b.oid) for p, b in sorted(tree.items())]}"
        name = sha1(spelled.encode()).hexdigest()
        self.commits[name] = tree
        self.refs[ref] = name
        self.messages.append(message)
        return name


@dataclass(frozen=True)
class Asked:
    """One request: bytes of its body, and of the answer's body that were sent."""

    method: str
    path: str
    status: int
    received: int
    sent: int
    token: str | None
    range: str | None


@dataclass
class Fault:
    """What the next `times` requests that fit are answered with; status 0 cuts the connection,
    after `body` bytes of what would have been the answer (None: before the request is even read)."""

    method: str
    pattern: str
    status: int
    times: int
    headers: Mapping[str, str]
    body: int | None = None
    after: bool = False
    stall: float = 0.0


class Pace:
    """A network of so many bytes a second for all that share it."""

    def __init__(self, rate: float) -> None:
        self._rate, self._free = rate, time.monotonic()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> None:
        """Wait until so many bytes have passed."""
        with self._lock:
            now = time.monotonic()
            self._free = max(self._free, now - _BUFFERED) + nbytes / self._rate
            wait = self._free - now
        if wait > _AHEAD:  # a sleep for each piece would take more than the piece
            time.sleep(wait)


class _Server(ThreadingHTTPServer):
    """One that says nothing of clients that hang up: on an answer that they do not believe, for one."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class LoopbackHub:
    """The server. `lfs_from` bytes and more, and every safetensors file, go through LFS. `garble` is
    applied to objects as they arrive."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.log: list[Asked] = []
        self.faults: list[Fault] = []
        self.lfs_from = 4096
        self.page = 1000
        self.garble: dict[str, int] = {}
        self.lying_tree = False
        # Of what arrives in a benchmark, which compares hashes alone: paced bodies are not kept.
        self.trusting = False
        self.ignored: set[str] = set()
        self.ranges = True
        self.waits: list[float] = []
        self.lock = threading.RLock()
        # Answers that a link to an object is good for (None: all), by the link's number; and whether it
        # is for the one range that it was asked for with.
        self.link_uses: int | None = None
        self.one_range_links = False
        self.links: list[str | None] = []
        # What a large file redirects to instead of its object.
        self.redirect: str | None = None
        # How fast bodies go each way; None: as fast as can be.
        self.down: Pace | None = None
        self.up: Pace | None = None
        # Called with each request before it is answered.
        self.watch: Callable[[str, str], None] = lambda method, path: None
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self.server = _Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def fail(
        self,
        method: str,
        pattern: str,
        status: int,
        times: int = 1,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Answer the next requests whose path the pattern is found in with an error."""
        self.faults.append(Fault(method, pattern, status, times, headers or {}))

    def cut(self, method: str, pattern: str, times: int = 1, *, after: bool = False) -> None:
        """Close the connection of the next requests: before the request is carried out, or `after`,
        instead of the answer."""
        self.faults.append(Fault(method, pattern, 0, times, {}, after=after))

    def cut_answer(self, pattern: str, body: int, times: int = 1) -> None:
        """Close the connection of the next downloads after so many bytes of the file."""
        self.faults.append(Fault("GET", pattern, 0, times, {}, body=body))

    def stall(self, pattern: str, body: int, seconds: float, times: int = 1) -> None:
        """Stop in the middle of the next downloads, after so many bytes of the file, for a while; then
        close the connection."""
        self.faults.append(Fault("GET", pattern, 0, times, {}, body=body, stall=seconds))

    def take(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times and fault.method == method and re.search(fault.pattern, path):
                    fault.times -= 1
                    return fault
        return None

    def asked(self, method: str, pattern: str = "") -> list[Asked]:
        """Requests so far, of one method, whose path the pattern is found in."""
        return [a for a in self.log if a.method == method and re.search(pattern, a.path)]

    def add(self, name: str, files: Mapping[str, bytes], *, private: bool = False) -> Repo:
        """A repo that is there already, with these files on main."""
        repo = self.repos[name] = Repo(private)
        repo.commit("main", {path: self.blob(path, data) for path, data in files.items()}, "first")
        return repo

    def blob(self, path: str, data: bytes) -> Blob:
        if not self.is_lfs(path, len(data)):
            return Blob(data, None)
        oid = sha256(data).hexdigest()
        self.objects[oid] = data
        return Blob(data, oid)

    def is_lfs(self, path: str, size: int) -> bool:
        return size >= self.lfs_from or path.endswith(".safetensors")


@contextmanager
def loopback_hub() -> Iterator[LoopbackHub]:
    """A running server."""
    hub = LoopbackHub()
    thread = threading.Thread(target=hub.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()


class _Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = "", body: Any = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.body = {"error": message} if body is None else body


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms for an acknowledgement

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    # --- One request ------------------------------------------------------------------------------

    def _serve(self) -> None:
        self.sent = self.status = 0
        self.answer_cut: int | None = None
        self.stall = 0.0
        parts = urlsplit(self.path)
        self.where, self.query = unquote(parts.path), parse_qs(parts.query)
        self.hub.watch(self.command, self.path)
        fault = self.hub.take(self.command, self.path)
        if fault is not None and fault.status == 0 and fault.body is None and not fault.after:
            self._drop(0)
            return
        self.body = self._read_body()
        if fault is not None and fault.status:
            self._answer(fault.status, {"error": "as injected"}, fault.headers)
        else:
            if fault is not None:
                self.answer_cut, self.stall = fault.body or 0, fault.stall
            try:
                with self.hub.lock:
                    handle = self._route()
                handle()
            except _Refused as no:
                headers = {"X-Error-Code": no.code, "X-Error-Message": no.message}
                self._answer(no.status, no.body, {k: v for k, v in headers.items() if v})

    def _drop(self, received: int) -> None:
        self.close_connection = True
        self._note(received)
        self.connection.close()

    def _note(self, received: int) -> None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        asked = Asked(
            self.command, self.path, self.status, received, self.sent, token,
            self.headers.get("Range"),
        )  # fmt: skip
        with self.hub.lock:
            self.hub.log.append(asked)

    def _read_body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            pieces = []
            while size := int(self.rfile.readline(), 16):
                pieces.append(self._receive(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)
        return self._receive(int(self.headers.get("Content-Length") or 0))

    def _receive(self, size: int) -> bytes:
        if self.hub.up is None:
            return self.rfile.read(size)
        if size <= _PACED:
            piece = self.rfile.read(size)
            self.hub.up.take(len(piece))
            return piece
        if self.hub.trusting:
            return self._counted(size, self.hub.up)
        # Straight to its place, and not copied after.
        body = bytearray(size)
        view, at = memoryview(body), 0
        while at < size and (got := self.rfile.readinto(view[at : at + _PACED])):
            self.hub.up.take(got)
            at += got
        view.release()
        del body[at:]
        return cast(bytes, body)  # nobody changes it any more

    def _counted(self, size: int, pace: Pace) -> bytes:
        """Of what arrives the size is kept, as zeroes that take no memory: gigabytes of fresh memory
        would take the cores of those that are measured."""
        view, left = memoryview(bytearray(_PACED)), size
        while left and (got := self.rfile.readinto(view[: min(left, _PACED)])):
            pace.take(got)
            left -= got
        return cast(bytes, mmap(-1, size - left))

    def _answer(
        self, status: int, body: Any = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        raw = isinstance(body, bytes | memoryview)
        data = body if raw else json.dumps(body).encode()
        kind = "application/octet-stream" if raw else "application/json"
        self.status = status
        part = data if self.answer_cut is None else data[: self.answer_cut]
        self.sent = 0 if self.command == "HEAD" else len(part)
        self._note(len(self.body))  # before the client can know, and look
        if self.answer_cut == 0:
            self.close_connection = True
            self.connection.close()
            return
        self.send_response(status)
        for name, value in {"Content-Type": kind, **(headers or {})}.items():
            self.send_header(name, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            self._send_body(part)
        except OSError:  # the client has what it wanted, and went
            self.close_connection = True
        if len(part) < len(data):
            time.sleep(self.stall)
            self.close_connection = True

    def _send_body(self, data: bytes | memoryview) -> None:
        if self.hub.down is None:
            self.wfile.write(data)
        else:
            view = memoryview(data)
            for at in range(0, len(view), _PACED):
                self.hub.down.take(len(view[at : at + _PACED]))
                self.wfile.write(view[at : at + _PACED])
        self.wfile.flush()

    # --- What is asked for ------------------------------------------------------------------------

    def _route(self) -> Any:
        table = [
            ("POST", r"/api/repos/create", self._create),
            ("POST", r"/api/validate-yaml", self._validate_yaml),
            ("POST", r"/api/models/([^/]+/[^/]+)/preupload/(.+)", self._preupload),
            ("POST", r"/api/models/([^/]+/[^/]+)/commit/(.+)", self._commit),
            ("POST", r"/api/models/([^/]+/[^/]+)/branch/(.+)", self._branch),
            ("DELETE", r"/api/models/([^/]+/[^/]+)/branch/(.+)", self._drop_branch),
            ("POST", r"/api/models/([^/]+/[^/]+)/paths-info/(.+)", self._paths_info),
            ("GET", r"/api/models/([^/]+/[^/]+)/refs", self._refs),
            ("GET", r"/api/models/([^/]+/[^/]+)/tree/(.+)", self._tree),
            ("GET", r"/api/models/([^/]+/[^/]+)/revision/(.+)", self._info),
            ("GET", r"/api/models/([^/]+/[^/]+)", self._info),
            ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self._batch),
            ("PUT", r"/lfs/(\w+)", self._put),
            ("POST", r"/lfs/(\w+)/verify", self._verify),
            ("GET", r"/cdn/(\w+)", self._cdn),
            ("HEAD", r"/cdn/(\w+)", self._cdn),
            ("GET", r"/([^/]+/[^/]+)/resolve/(.+)", self._resolve),
            ("HEAD", r"/([^/]+/[^/]+)/resolve/(.+)", self._resolve),
        ]
        for method, pattern, call in table:
            match = re.fullmatch(pattern, self.where)
            if match is not None and method == self.command:
                return lambda call=call, match=match: call(*match.groups())
        raise _Refused(404, "", f"no such page: {self.command} {self.where}")

    def _known(self) -> bool:
        """Whether the request has the token, also as a password in the URL, which httpx sends instead
        of the header."""
        kind, _, said = (self.headers.get("Authorization") or "").partition(" ")
        if kind == "Basic":
            said = base64.b64decode(said).decode().partition(":")[2]
        return said == TOKEN

    def _writer(self) -> None:
        if not self._known():
            raise _Refused(401, "", "Invalid credentials in Authorization header")

    def _repo(self, name: str) -> Repo:
        repo = self.hub.repos.get(name)
        known = self._known()
        if repo is None or (repo.private and not known):
            raise _Refused(404 if known else 401, "RepoNotFound", "Repository not found")
        return repo

    def _named(self, repo: Repo, revision: str) -> str:
        if revision in repo.refs:
            return repo.refs[revision]
        if revision in repo.commits:
            return revision
        raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")

    def _create(self) -> None:
        self._writer()
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}"
        url = f"{self.hub.url}/{name}"
        if name in self.hub.repos:
            raise _Refused(409, "", "", {"error": "You already created this repo", "url": url})
        self.hub.add(name, {".gitattributes": b"*.safetensors filter=lfs\n"},
                     private=asked.get("visibility") == "private")  # fmt: skip
        self._answer(200, {"url": url, "name": name})

    def _validate_yaml(self) -> None:
        errors, warnings = judged(json.loads(self.body)["content"])
        body = {
            "errors": [{"message": text} for text in errors],
            "warnings": [{"message": text} for text in warnings],
        }
        self._answer(400 if errors else 200, body)

    def _preupload(self, name: str, revision: str) -> None:
        self._writer()
        repo = self._repo(name)
        tree = repo.tree(self._named(repo, revision))
        files = []
        for file in json.loads(self.body)["files"]:
            path = file["path"]
            old = tree.get(path)
            files.append(
                {
                    "path": path,
                    "uploadMode": "lfs" if self.hub.is_lfs(path, file["size"]) else "regular",
                    "shouldIgnore": path in self.hub.ignored,
                    "oid": None if old is None else old.lfs or old.oid,
                }
            )
        self._answer(200, {"files": files})

    def _batch(self, name: str) -> None:
        self._writer()
        self._repo(name)
        listed: list[dict[str, Any]] = []
        for wanted in json.loads(self.body)["objects"]:
            oid, size = wanted["oid"], wanted["size"]
            entry: dict[str, Any] = {"oid": oid, "size": size}
            if oid not in self.hub.objects:
                at = f"{self.hub.url}/lfs/{oid}"
                entry["actions"] = {"upload": {"href": at}, "verify": {"href": f"{at}/verify"}}
            listed.append(entry)
        self._answer(200, {"transfer": "basic", "objects": listed})

    def _put(self, oid: str) -> None:
        if not self.hub.trusting and sha256(self.body).hexdigest() != oid:
            raise _Refused(400, "", "these bytes have another hash")
        self.hub.objects[oid] = self.body
        self._answer(200)

    def _verify(self, oid: str) -> None:
        self._writer()
        said = json.loads(self.body)
        if said["size"] != len(self.hub.objects.get(oid, b"")):
            raise _Refused(422, "", "another size")
        self._answer(200, {})

    def _commit(self, name: str, revision: str) -> None:
        self._writer()
        repo = self._repo(name)
        tree = dict(repo.tree(self._named(repo, revision)))
        message = ""
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
                parent = value.get("parentCommit")
                if parent is not None and self._named(repo, revision) != parent:
                    raise _Refused(
                        412, "", "A commit has happened since. Please refresh and try again."
                    )
            elif item["key"] == "file":
                tree[value["path"]] = Blob(base64.b64decode(value["content"]), None)
            elif item["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    raise _Refused(400, "", f"{value['path']}: its LFS object was never sent")
                tree[value["path"]] = Blob(self._stored(value), value["oid"])
            elif item["key"] == "deletedFile":
                del tree[value["path"]]
        pull = None
        if "create_pr" in self.query:
            repo.pull_requests += 1
            revision = f"refs/pr/{repo.pull_requests}"
            pull = f"{self.hub.url}/{name}/discussions/{repo.pull_requests}"
        oid = repo.commit(revision, tree, message)
        url = f"{self.hub.url}/{name}/commit/{oid}"
        self._answer(200, {"commitUrl": url, "commitOid": oid, "pullRequestUrl": pull})

    def _stored(self, value: Mapping[str, str]) -> bytes:
        """An object's bytes, with the bit of `garble` flipped."""
        at = self.hub.garble.get(value["path"])
        if at is not None:
            data = bytearray(self.hub.objects[value["oid"]])
            data[at] ^= 1
            self.hub.objects[value["oid"]] = bytes(data)
        return self.hub.objects[value["oid"]]

    def _branch(self, name: str, branch: str) -> None:
        self._writer()
        repo = self._repo(name)
        if branch in repo.refs:
            raise _Refused(409, "", "Reference already exists")
        if branch.startswith("refs/"):
            raise _Refused(400, "", "Invalid reference for a branch")
        repo.refs[branch] = repo.refs["main"]
        self._answer(201, {})

    def _drop_branch(self, name: str, branch: str) -> None:
        self._writer()
        repo = self._repo(name)
        if branch == "main" or branch.startswith("refs/"):
            raise _Refused(403, "", "Cannot delete this reference")
        if branch not in repo.refs:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {branch}")
        del repo.refs[branch]
        self._answer(200, {})

    def _refs(self, name: str) -> None:
        repo = self._repo(name)
        branches = [
            {"name": ref, "ref": f"refs/heads/{ref}", "targetCommit": sha}
            for ref, sha in repo.refs.items()
            if not ref.startswith("refs/")
        ]
        self._answer(200, {"branches": branches, "converts": [], "tags": []})

    def _paths_info(self, name: str, revision: str) -> None:
        repo = self._repo(name)
        tree = repo.commits[self._named(repo, revision)]
        wanted = parse_qs(self.body.decode())["paths"]
        self._answer(200, [self._entry(path, tree[path]) for path in wanted if path in tree])

    def _entry(self, path: str, blob: Blob) -> dict[str, Any]:
        """A file as the Hub lists it."""
        entry: dict[str, Any] = {
            "type": "file", "path": path, "size": len(blob.data), "oid": blob.oid,
        }  # fmt: skip
        if blob.lfs is not None:
            # What lies there, unless the server only repeats what it was told.
            oid = blob.lfs if self.hub.lying_tree else sha256(blob.data).hexdigest()
            entry["lfs"] = {"oid": oid, "size": len(blob.data), "pointerSize": 130}
        return entry

    def _info(self, name: str, revision: str = "main") -> None:
        repo = self._repo(name)
        sha = self._named(repo, revision)
        listed = [{"rfilename": path} for path in sorted(repo.commits[sha])]
        body = {"id": name, "modelId": name, "sha": sha, "private": repo.private, "tags": []}
        self._answer(200, {**body, "downloads": 0, "likes": 0, "siblings": listed})

    def _tree(self, name: str, revision: str) -> None:
        repo = self._repo(name)
        tree = sorted(repo.commits[self._named(repo, revision)].items())
        start = int(self.query.get("cursor", ["0"])[0])
        listed = [self._entry(path, blob) for path, blob in tree[start : start + self.hub.page]]
        headers = {}
        if start + self.hub.page < len(tree):
            stem = f"{self.hub.url}{self.path.partition('?')[0]}"
            following = f"{stem}?recursive=true&cursor={start + self.hub.page}"
            headers["Link"] = f'<{following}>; rel="next"'
        self._answer(200, listed, headers)

    def _resolve(self, name: str, rest: str) -> None:
        repo = self._repo(name)
        for ref in sorted([*repo.refs, *repo.commits], key=len, reverse=True):
            if rest.startswith(f"{ref}/"):
                revision, path = ref, rest.removeprefix(f"{ref}/")
                break
        else:
            raise _Refused(404, "RevisionNotFound", "Invalid rev id")
        sha = self._named(repo, revision)
        blob = repo.commits[sha].get(path)
        if blob is None:
            raise _Refused(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": sha, "ETag": f'"{blob.lfs or blob.oid}"'}
        if blob.lfs is None:
            self._send(blob.data, headers)
            return
        self.hub.objects[blob.lfs] = blob.data
        # Another host name for the same server: the client must not take its token there.
        with self.hub.lock:
            self.hub.links.append(self.headers.get("Range") if self.hub.one_range_links else None)
            number = len(self.hub.links) - 1
        link = f"http://localhost:{self.hub.port}/cdn/{blob.lfs}?link={number}"
        headers["Location"] = self.hub.redirect or link
        headers["X-Linked-ETag"] = f'"{blob.lfs}"'
        headers["X-Linked-Size"] = str(len(blob.data))
        self._answer(302, b"", headers)

    def _cdn(self, oid: str) -> None:
        number = int(self.query["link"][0])
        used = len(self.hub.asked("GET", rf"/cdn/\w+\?link={number}$"))
        over = self.hub.link_uses is not None and used >= self.hub.link_uses
        if over or self.hub.links[number] not in (None, self.headers.get("Range")):
            raise _Refused(403, "", "the link has expired")
        self._send(self.hub.objects[oid], {"ETag": f'"{oid}"'})

    def _send(self, data: bytes, headers: Mapping[str, str]) -> None:
        """A file, or the range of it that is asked for."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked is None or not self.hub.ranges:
            self._answer(200, data, {**headers, "Accept-Ranges": "bytes"})
            return
        start, stop = int(asked[1]), min(int(asked[2] or len(data)) + 1, len(data))
        span = f"bytes {start}-{stop - 1}/{len(data)}"
        self._answer(206, memoryview(data)[start:stop], {**headers, "Content-Range": span})


def judged(text: str) -> tuple[list[str], list[str]]:
    """Errors and warnings a model card's front matter gets: the part of the Hub's rules that cards
    made here could break."""
    import yaml

    match = re.match(r"---\n(.*?)\n---(\n|$)", text, re.DOTALL)
    if match is None:
        return [], ["empty or missing yaml metadata in repo card"]
    try:
        found = yaml.safe_load(match[1])  # YAML 1.1: what it takes for text, any reader does
    except yaml.YAMLError as error:
        return [f"yaml: {error}"], []
    if not isinstance(found, dict):
        return ["metadata must be a mapping"], []
    errors, warnings = [], []
    bases = found.get("base_model", [])
    for base in bases if isinstance(bases, list) else [bases]:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(base)):
            errors.append(f'"base_model" {base!r} is not a valid model id')
    if found.get("base_model_relation", "quantized") not in _RELATIONS:
        errors.append('"base_model_relation" must be one of the four')
    for key in ("license", "library_name", "pipeline_tag"):
        if key in found and not isinstance(found[key], str):
            errors.append(f'"{key}" must be a string')
    if found.get("license") == "other" and "license_name" not in found:
        warnings.append('"license: other" wants a license_name')
    said = found.get("language", [])
    if not all(isinstance(text, str) for text in (said if isinstance(said, list) else [said])):
        errors.append('"language" must be a string or a list of strings')
    tags = found.get("tags", [])
    if not isinstance(tags, list) or len(set(map(str, tags))) != len(tags):
        errors.append('"tags" must be a list without repeats')
    return errors, warnings
