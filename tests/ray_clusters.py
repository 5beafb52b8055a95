"""A Ray cluster of processes on this machine, without a network, a dashboard or anything left behind."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# A node that is killed is missed at once. Usage statistics would be sent, metrics need a server.
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
    # Other tests may take this machine's memory; workers are not to be killed for it.
    "RAY_memory_monitor_refresh_ms": "0",
}
_STORE = 80 << 20  # the least that Ray takes for its object store


@contextmanager
def cluster() -> Iterator[Any]:
    """A head without CPUs; tests add nodes. Sockets have short paths: its folder is not pytest's."""
    folder = tempfile.mkdtemp(prefix="qray-")
    before = {name: os.environ.get(name) for name in (*_SETTINGS, "RAY_TMPDIR", "RAY_ADDRESS")}
    os.environ |= _SETTINGS | {"RAY_TMPDIR": folder}
    os.environ.pop("RAY_ADDRESS", None)
    made, handler = None, signal.getsignal(signal.SIGTERM)
    try:
        from ray.cluster_utils import Cluster

        made = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0, "object_store_memory": _STORE, "include_dashboard": False,
            },
        )  # fmt: skip
        made.folder = folder
        yield made
    finally:
        if made is not None:
            made.shutdown()
        signal.signal(signal.SIGTERM, handler)  # a node of Ray's has taken it
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


def add_node(made: Any, cores: int = 1, memory: int = 1 << 30, **more: Any) -> Any:
    return made.add_node(num_cpus=cores, memory=memory, object_store_memory=_STORE, **more)


def processes(folder: str) -> dict[int, str]:
    """Processes that were started with the settings of a cluster, by number, with their names."""
    mark, found = f"RAY_TMPDIR={folder}".encode(), {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                found[int(entry.name)] = words[0].decode(errors="replace")
        except OSError:  # it has ended
            continue
    return found


def anonymous_bytes(process: int) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
