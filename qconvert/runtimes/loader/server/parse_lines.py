"""Serving lines parsed by a runtime's own argument parser, in its server (serving.py): sglang's
`ServerArgs.add_cli_args`, and vLLM's `AsyncEngineArgs.add_cli_args`, on which its command is
built (the model is its positional argument)."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Mapping
from typing import Any

_KEPT = ("model", "model_path", "tp_size", "tensor_parallel_size", "pp_size", "pipeline_parallel_size",
         "kt_method", "kt_num_gpu_experts", "kv_cache_dtype", "nnodes",
         "disable_shared_experts_fusion")  # fmt: skip


def parsed(parser: argparse.ArgumentParser, words: list[str]) -> Mapping[str, Any]:
    """Parse some of a line's arguments: what the parser makes of them, or what it says."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found = vars(parser.parse_args(words))
    except SystemExit:
        return {"error": said.getvalue().strip().splitlines()[-1]}
    return {name: found[name] for name in _KEPT if found.get(name) is not None}
