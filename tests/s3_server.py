"""An S3 server on the loopback (moto's), behind a proxy that counts what it sends, and fails if told."""

from __future__ import annotations

import http.client
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

from qconvert.checkpoint import fsspec_store

BUCKET = "models"
_HOPS = {"connection", "transfer-encoding", "keep-alive", "server", "date"}


@dataclass(frozen=True)
class Asked:
    """A request that was answered, and how many bytes its answer held."""

    method: str
    path: str
    range: str | None
    nbytes: int
    status: int = 200
    agent: str = ""

    @property
    def is_get(self) -> bool:
        """Whether it asked for an object's bytes; lists have a query."""
        return self.method == "GET" and "?" not in self.path


@dataclass
class Server:
    """The server behind its proxy. `fault` says what becomes of a request, by its number among all:
    None (it is answered), a status, or `cut` (the connection ends in the middle of the body)."""

    port: int = 0
    fault: Callable[[int, str, str], int | str | None] = lambda number, method, path: None
    asked: list[Asked] = field(default_factory=list)
    seen: int = 0
    lock: Any = field(default_factory=threading.Lock)
    client: Any = None

    @property
    def environment(self) -> dict[str, str]:
        """What S3 clients read."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "not-a-secret",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_RETRY_MODE": "standard", "AWS_MAX_ATTEMPTS": "1",
        }  # fmt: skip

    def put(self, folder: Path, prefix: str) -> str:
        """Upload a folder's files. Returns its URL."""
        for file in sorted(folder.rglob("*")):
            if file.is_file() and ".qconvert" not in file.parts:
                key = f"{prefix}/{file.relative_to(folder).as_posix()}"
                self.client.put_object(Bucket=BUCKET, Key=key, Body=file.read_bytes())
        self.forget()
        return f"s3://{BUCKET}/{prefix}"

    def get(self, prefix: str) -> dict[str, bytes]:
        """All objects below a prefix."""
        listed = self.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/").get("Contents", [])
        return {
            each["Key"].removeprefix(f"{prefix}/"): self.client.get_object(
                Bucket=BUCKET, Key=each["Key"]
            )["Body"].read()
            for each in listed
        }

    def forget(self) -> None:
        with self.lock:
            self.asked.clear()
            self.seen = 0

    def fetched(self, suffix: str = "", by: str = "") -> int:
        """Bytes of objects that were sent; `by` is a client's AWS_EXECUTION_ENV."""
        with self.lock:
            found = [a for a in self.asked if a.is_get and a.path.endswith(suffix)]
        return sum(asked.nbytes for asked in found if by in asked.agent)


class _Front(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tests kill clients in the middle of an answer."""


def _handler(server: Server, behind: int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with server.lock:
                number, server.seen = server.seen, server.seen + 1
            fault = server.fault(number, self.command, self.path)
            if isinstance(fault, int):
                with server.lock:
                    server.asked.append(Asked(self.command, self.path, None, 0, fault))
                self._send(fault, {}, b"")
                return
            connection = http.client.HTTPConnection("127.0.0.1", behind, timeout=60)
            headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOPS}
            connection.request(self.command, self.path, body, headers)
            found = connection.getresponse()
            data = found.read()
            connection.close()
            with server.lock:
                asked = Asked(
                    self.command, self.path, self.headers.get("Range"), len(data), found.status,
                    self.headers.get("User-Agent", ""),
                )  # fmt: skip
                server.asked.append(asked)
            self._send(found.status, dict(found.getheaders()), data, cut=fault == "cut")

        def _send(
            self, status: int, headers: Mapping[str, str], data: bytes, *, cut: bool = False
        ) -> None:
            self.send_response(status)
            for key, value in headers.items():
                if key.lower() not in _HOPS | {"content-length"}:
                    self.send_header(key, value)
            length = headers.get("Content-Length", str(len(data)))
            self.send_header("Content-Length", length)
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if cut else data)
            self.wfile.flush()
            if cut:
                self.close_connection = True
                self.connection.shutdown(2)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer

    return Handler


@contextmanager
def serving() -> Iterator[Server]:
    """A server with an empty bucket, and the environment in which clients find it."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    moto.start()
    server = Server()
    front = _Front(("127.0.0.1", 0), _handler(server, moto.get_host_and_port()[1]))
    server.port = front.server_port
    thread = threading.Thread(target=front.serve_forever, daemon=True)
    thread.start()
    try:
        # A client keeps the endpoint that it was opened with.
        with (
            mock.patch.dict("os.environ", server.environment),
            mock.patch.dict(fsspec_store._OPENED, clear=True),
        ):
            server.client = boto3.client("s3")
            server.client.create_bucket(Bucket=BUCKET)
            yield server
    finally:
        front.shutdown()
        front.server_close()
        moto.stop()
