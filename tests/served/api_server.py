"""A runtime's own HTTP server (SERVED_RUNTIME: vllm or sglang) by its arguments, where packages that no
request here needs are absent.

Its engine is a process of its own, which imports this file as `__mp_main__`.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path

RUNTIME = "SERVED_RUNTIME"
_SERVERS = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}

if __name__ in ("__main__", "__mp_main__"):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    runtime = os.environ.get(RUNTIME, "vllm")
    importlib.import_module(f"served.{runtime}_engine").prepare()

if __name__ == "__main__":
    runpy.run_module(_SERVERS[runtime], run_name="__main__")
