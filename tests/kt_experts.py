"""One expert by kt-kernel's own converter, in a process, and by ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import amx_rows
import kt_convert
import numpy as np
from ops_harness import buffer, run_op

from qconvert.core.dtypes import TensorType
from qconvert.formats.amx.encode import Amx
from qconvert.formats.amx.format import Method


def run_kt(method: Method, numa: int, folder: Path) -> subprocess.CompletedProcess[str]:
    name = {"int4": "AMXINT4", "int8": "AMXINT8"}[method]
    command = [sys.executable, kt_convert.__file__, name, str(numa), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def layer_of(intermediate: int, hidden: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """One expert, as bf16 bits, with every kind of row there is."""
    return {
        "gate": amx_rows.matrix(intermediate, hidden, seed)[None],
        "up": amx_rows.matrix(intermediate, hidden, seed + 1)[None],
        "down": amx_rows.matrix(hidden, intermediate, seed + 2)[None],
    }


def ours(method: Method, numa: int, name: str, bits: np.ndarray[Any, Any]) -> list[bytes]:
    """Weight and scale of each NUMA shard, in turn."""
    if name == "down":
        kind = TensorType("BF16", bits.shape)
        return run_op(Amx(method, numa), [buffer(kind, bits.tobytes())], 1 << 20)[0]
    found = []
    for rows in np.split(bits, numa):
        kind = TensorType("BF16", rows.shape)
        found += run_op(Amx(method), [buffer(kind, rows.tobytes())], 1 << 20)[0]
    return found
