"""Choice of an engine, and the address of a cluster: what can be refused without Ray."""

from __future__ import annotations

import re
from typing import Literal

from qconvert.core.errors import PlanError, UsageError
from qconvert.core.extras import lacking

# Those that a user chooses from; a shard is an engine by its own option.
EngineName = Literal["local", "ray"]
ENGINES: tuple[EngineName, ...] = ("local", "ray")
# A cluster of this process's own, on this machine alone.
OWN = "local"
_ADDRESS = re.compile(r"auto|local|([A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")


def check_address(address: str) -> None:
    """Raise UsageError for an address that is none."""
    if address.startswith("ray://"):
        raise UsageError(
            f"--address {address[:60]}: a Ray client is outside of the cluster; run qconvert on one of "
            "its machines, and name the head as HOST:PORT"
        )
    if not _ADDRESS.fullmatch(address):
        raise UsageError(f"--address {address[:60]!r}: write HOST:PORT, auto or local")


def check_engine(engine: str, address: str | None, shard: object | None) -> None:
    """Raise UsageError for options that exclude one another, and words that are none."""
    if engine not in ENGINES:
        raise UsageError(f"--engine {engine[:40]!r}: write one of {', '.join(ENGINES)}")
    if engine != "ray":
        if address is not None:
            raise UsageError("--address names a Ray cluster: give --engine ray with it")
        return
    if shard is not None:
        raise UsageError(
            "--engine ray and --shard exclude one another: a shard is done by the machine that is given "
            "it; leave one of them out"
        )
    if address is not None:
        check_address(address)


def check_installed() -> None:
    """Raise PlanError where ray is not installed."""
    missing = lacking("ray")
    if missing:
        raise PlanError(f"--engine ray: {missing}, on every node")
