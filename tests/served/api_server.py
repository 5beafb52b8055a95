"""vLLM's own HTTP server (`python -m vllm.entrypoints.openai.api_server`) by its arguments, where
packages that no request here needs are absent.

Its engine is a process of its own, which imports this file as `__mp_main__`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ in ("__main__", "__mp_main__"):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from served import vllm_engine

    vllm_engine.prepare()

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
