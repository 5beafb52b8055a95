"""Serving lines parsed by a runtime's own argument parser.

Run in the loaders' environment, in tests/: python -m loaders.parse_lines sglang < lines.json
The lines come as a JSON list of lists of arguments; printed is, for each, what the parser made of some
of them, or what it said. Checked with sglang 0.5.23 (`ServerArgs.add_cli_args`) and vLLM 0.33.0
(`AsyncEngineArgs.add_cli_args`, what `vllm serve` builds on; the model is its positional argument).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

_KEPT = ("model", "model_path", "tp_size", "tensor_parallel_size", "pp_size", "pipeline_parallel_size",
         "kt_method", "kt_num_gpu_experts", "kv_cache_dtype", "nnodes",
         "disable_shared_experts_fusion")  # fmt: skip


def _sglang() -> argparse.ArgumentParser:
    from loaders.serve_sglang import _import_all

    _import_all((9, 0))
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def _vllm() -> argparse.ArgumentParser:
    from loaders.serve_vllm import _import_all

    _import_all((9, 0))
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return parser


def _parsed(parser: argparse.ArgumentParser, words: list[str]) -> Mapping[str, Any]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found = vars(parser.parse_args(words))
    except SystemExit:
        return {"error": said.getvalue().strip().splitlines()[-1]}
    return {name: found[name] for name in _KEPT if found.get(name) is not None}


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed by an import is no answer
    made = {"sglang": _sglang, "vllm": _vllm}[sys.argv[1]]()
    asked = json.load(sys.stdin)
    json.dump([_parsed(made, words) for words in asked], answers, default=str)
    answers.flush()
    os._exit(0)
