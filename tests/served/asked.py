"""A runtime's HTTP server of each of some folders on a GPU, asked by `qconvert ask`: `make asked`.

    python tests/served/asked.py FOLDER [--runtime sglang] [--only REGEX] [--workers 8] [--table FILE]

A row is a folder that is served, one that is asked about, and the verdict that is expected. Exit code 1
where one is another.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

if __name__ == "__main__":  # a file that is run: `served` lies beside its folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from served.api_server import RUNTIME
from served.damage import damaged
from served.models import build, hf
from served.rows import Damage

_SOURCE = "moe"
_SURE = 4.0  # of the head: as a trained model, this one prefers few tokens by far
_LONGEST = 240.0  # seconds until a server answers
_LINES = 30  # of a log that are shown where a server does not start
_EAGER = "eager"  # an argument of rows, that each runtime has under a name of its own
# The smallest that serves the texts of `ask`; Triton's attention as in the engines beside this file.
_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "vllm": (
        "--model", "{folder}", "--max-model-len", "256", "--max-num-seqs", "8",
        "--max-num-batched-tokens", "512", "--gpu-memory-utilization", "0.02",
        "--kv-cache-memory-bytes", str(512 << 20), "--attention-backend", "TRITON_ATTN", "--seed", "0",
    ),
    "sglang": (
        "--model-path", "{folder}", "--context-length", "512", "--max-running-requests", "8",
        "--max-total-tokens", "4096", "--mem-fraction-static", "0.3", "--attention-backend", "triton",
        "--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-radix-cache",
        "--disable-custom-all-reduce", "--skip-server-warmup", "--random-seed", "0",
    ),
}  # fmt: skip
_EAGER_OF = {"vllm": "--enforce-eager", "sglang": "--disable-cuda-graph"}
_MADE: Mapping[str, str] = {
    "w4": "w4a16 --rtn --group-size 32",
    "w4-linears": "w4a16 --rtn --group-size 32 --targets Linear",
    "fp8": "fp8",
    "fp8-channel": "fp8 --channel",
    "fp8-tensor": "fp8 --tensor",
    "fp8-static": "fp8 --tensor --input-scale 0.05",
    "int8": "int8",
    "mxfp4": "mx",
    "nvfp4": "nvfp4 --dialect compressed-tensors",
    "nvfp4-linears": "nvfp4 --dialect compressed-tensors --targets Linear",
    "w4-kv": "w4a16 --rtn --group-size 32 --targets Linear --kv-scale 0.02",
}
# `validate --for sglang` refuses INT8 experts and does not know MXFP4's; 0.4.5 of its kernels has no
# static input scales (docs/served.md).
_NOT_SGLANG = ("int8", "mxfp4", "fp8-static")
# Folders that are wrong: what is done to which.
_DAMAGES: Mapping[str, tuple[str, Damage]] = {
    "rows": (_SOURCE, "permuted rows"),
    "experts": (_SOURCE, "exchanged experts"),
    "fp8-rows": ("fp8", "permuted rows"),
    "fp8-scales": ("fp8", "shifted blocks"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """`served` with arguments and environment of its own, `asked` about, and the verdicts that are
    right."""

    name: str
    served: str
    asked: str
    verdicts: tuple[str, ...] = ("right",)
    arguments: tuple[str, ...] = (_EAGER,)
    environment: Mapping[str, str] = field(default_factory=dict)
    runtimes: tuple[str, ...] = ("vllm", "sglang")


_ROWS = (
    Row(_SOURCE, _SOURCE, _SOURCE),
    *(
        Row(name, name, name, runtimes=("vllm",) if name in _NOT_SGLANG else ("vllm", "sglang"))
        for name in _MADE
    ),
    Row("graphs", _SOURCE, _SOURCE, arguments=()),
    # Controls: what the server computes are not the folder's weights, or more is rounded.
    Row("w4-of-source", "w4", _SOURCE, ("more error",)),
    *(Row(name, name, source, ("more error", "garbage")) for name, (source, _) in _DAMAGES.items()),
    Row("head", "head", _SOURCE, ("garbage",)),
    Row("kv-fp8", _SOURCE, _SOURCE, ("more error",),
        (_EAGER, "--kv-cache-dtype", "fp8_e4m3")),
    Row("marlin-int8", "w4-linears", "w4-linears", ("garbage",),
        environment={"VLLM_MARLIN_INPUT_DTYPE": "int8"}, runtimes=("vllm",)),
)  # fmt: skip


def _qconvert(*arguments: str | Path, gpu: str | None = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    command = [sys.executable, "-m", "qconvert", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def _make_source(folder: Path) -> None:
    """The model with a tokenizer of bytes, so that `ask` has its own texts."""
    build(_SOURCE, folder)
    (shard,) = folder.glob("*.safetensors")
    tensors = load_file(shard)
    tensors["lm_head.weight"] *= _SURE
    save_file(tensors, shard, metadata={"format": "pt"})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    hf.PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(folder)


def _make(root: Path, name: str) -> None:
    """A folder from the source. Raises RuntimeError where the command fails."""
    source, target = root / _SOURCE, root / name
    if target.exists():
        return
    if name in _MADE:
        command, *options = _MADE[name].split()
        done = _qconvert(command, source, target, *options, "-q", "--jobs", "1")
        if done.returncode:
            raise RuntimeError(f"{name}: {(done.stderr or done.stdout)[-1500:]}")
    elif name in _DAMAGES:
        sound, damage = _DAMAGES[name]
        _make(root, sound)
        damaged(root / sound, target, damage)
    else:
        _with_other_head(source, target)


def _with_other_head(source: Path, target: Path) -> None:
    """The rows of the head one further on: each token has another's logits."""
    import shutil

    shutil.copytree(source, target)
    (shard,) = target.glob("*.safetensors")
    tensors = load_file(shard)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, 0).contiguous()
    save_file(tensors, shard, metadata={"format": "pt"})


def _answered(root: Path, row: Row, runtime: str) -> dict[str, Any]:
    """The answer of `ask` for a row: its JSON, or the `error` and the end of the server's log."""
    log, port = root / f"{row.name}.log", _free_port()
    own = (_EAGER_OF[runtime] if one == _EAGER else one for one in row.arguments)
    command = [sys.executable, str(Path(__file__).with_name("api_server.py")),
               *(one.format(folder=root / row.served) for one in _ARGUMENTS[runtime]), *own,
               "--served-model-name", row.served, "--host", "127.0.0.1", "--port", str(port),
               "--dtype", "bfloat16"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "2", RUNTIME: runtime, **row.environment}
    began = time.monotonic()
    with log.open("wb") as written:
        server = subprocess.Popen(
            command, stdout=written, stderr=subprocess.STDOUT, env=environment
        )
    try:
        url = f"http://127.0.0.1:{port}"
        while not _is_ready(url):
            if server.poll() is not None or time.monotonic() - began > _LONGEST:
                lines = log.read_text(errors="replace").splitlines()[-_LINES:]
                return {"error": f"no answer; ended with {server.poll()}", "log": lines}
            time.sleep(0.5)
        started = time.monotonic() - began
        done = _qconvert("ask", root / row.asked, "--server", url, "--json", gpu=None)
        if done.returncode not in (0, 3):
            lines = log.read_text(errors="replace").splitlines()[-_LINES:]
            return {"error": (done.stderr or done.stdout)[-1500:], "log": lines}
        found: dict[str, Any] = json.loads(done.stdout)
        return {**found, "code": done.returncode, "started": round(started, 1)}
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _line(row: Row, found: Mapping[str, Any]) -> tuple[str, ...]:
    made = _MADE.get(row.served, row.served)
    own = (*row.arguments, *(f"{key}={value}" for key, value in row.environment.items()))
    start = (row.name, made, row.asked, " ".join(own))
    if "error" in found:
        return (*start, "error", " ".join(found["error"].split())[:160], "")
    parts = (
        f"{one['median']:.5f} {one['high']:.5f} of {one['limit']:.5f} ({one['noise']:.5f}), "
        f"{one['agreement']:.2f}"
        for one in (found["prefill"], found["decode"])
    )
    return (*start, found["verdict"], *parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--runtime", default="vllm", choices=sorted(_ARGUMENTS))
    parser.add_argument("--only", default="")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    rows = [
        row for row in _ROWS if given.runtime in row.runtimes and re.search(given.only, row.name)
    ]
    given.root.mkdir(parents=True, exist_ok=True)
    if not (given.root / _SOURCE).exists():
        _make_source(given.root / _SOURCE)
    names = {name for row in rows for name in (row.served, row.asked)}
    with ThreadPoolExecutor(given.workers) as pool:
        list(pool.map(lambda name: _make(given.root, name), names - _DAMAGES.keys()))
        for name in names & _DAMAGES.keys():
            _make(given.root, name)

        def asked(row: Row) -> dict[str, Any]:
            found = _answered(given.root, row, given.runtime)
            print(" | ".join(_line(row, found)), *found.get("log", ()), sep="\n", flush=True)
            return found

        answers = list(zip(rows, pool.map(asked, rows), strict=True))
    (given.root / "answers.json").write_text(
        json.dumps({row.name: found for row, found in answers}, indent=1)
    )
    table: list[tuple[str, ...]] = [
        ("row", "served", "asked", "options", "verdict", "texts", "added tokens"),
        ("---",) * 7,
    ]
    table += [_line(row, found) for row, found in answers]
    if given.table is not None:
        given.table.write_text("".join(f"| {' | '.join(line)} |\n" for line in table))
    other = [row.name for row, found in answers if found.get("verdict") not in row.verdicts]
    print(
        f"{len(rows) - len(other)} of {len(rows)} as expected; others: {', '.join(other) or 'none'}"
    )
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
