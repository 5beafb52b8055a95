"""Requests and answers of `qconvert ask`, held to the servers' code: requests are taken by their own
classes, and answers, from the same numbers, are what their own functions make. sglang's verifier of a
folder's hashes accepts the file that `qconvert sign --checksums` writes.

Run by the runtimes' interpreter, this file prints what they make, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

TESTS = Path(__file__).parent.parent
IDS, ADDED, TOP = [5, 7, 9], [11, 13], 3
# Log-probabilities of the ids that follow, in binary fractions, which JSON keeps.
ROWS = [{7: -0.5, 4: -1.25, 3: -2.5}, {3: -0.75, 2: -1.5, 1: -2.0, 9: -6.5},
        {11: -0.25, 9: -3.0, 8: -4.5},
        {13: -0.125, 11: -3.5, 2: -5.0}]  # fmt: skip

pytestmark = pytest.mark.loader


def _vllm(request: dict[str, Any]) -> dict[str, Any]:
    """By vLLM's serving of completions, its request and its response."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput

    asked = CompletionRequest.model_validate(request)
    extra = sorted(asked.model_extra or {})
    params = asked.to_sampling_params(asked.max_tokens, {})
    prompt = len(IDS) - 1
    rows = [
        {id: Logprob(value, n + 1, "x") for n, (id, value) in enumerate(row.items())}
        for row in ROWS
    ]
    output = CompletionOutput(0, "x", ADDED, -1.0, rows[prompt:], finish_reason="length")
    final = RequestOutput("1", None, IDS, [None, *rows[:prompt]], [output], True)
    serving: Any = object.__new__(OpenAIServingCompletion)
    vars(serving).update(
        return_tokens_as_token_ids=False, enable_prompt_tokens_details=False,
        enable_force_include_usage=False,
        system_fingerprint=None, enable_per_request_metrics=False,
    )  # fmt: skip
    made = serving.request_output_to_completion_response(
        [final], asked, "1", 1, request["model"], None, SimpleNamespace(final_usage_info=None)
    )
    assert isinstance(made, CompletionResponse)
    kept = {
        name: getattr(params, name)
        for name in ("prompt_logprobs", "logprobs", "ignore_eos", "max_tokens")
    }
    return {"extra": extra, "params": kept, "answer": json.loads(made.model_dump_json())}


def _sglang(request: dict[str, Any]) -> dict[str, Any]:
    """By sglang's tokenizer manager, and its request."""
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    asked = GenerateReqInput(**request)
    asked.normalize_batch_and_arguments()
    ids, prompt = [*IDS, *ADDED], len(IDS) - 1
    tops = [list(row.items())[:TOP] for row in ROWS]
    values, chosen = ([[pair[n] for pair in row] for row in tops] for n in (1, 0))
    own = [row[token] for row, token in zip(ROWS, ids[1:], strict=True)]
    parts = {
        "input_token_logprobs": ([None, *own[:prompt]], IDS),
        "output_token_logprobs": (own[prompt:], ADDED),
        "input_top_logprobs": ([None, *values[:prompt]], [None, *chosen[:prompt]]),
        "output_top_logprobs": (values[prompt:], chosen[prompt:]),
    }
    state: Any = SimpleNamespace(obj=asked, input_top_logprobs_scheduler_flat=None, finished=True)
    for name, (val, idx) in parts.items():
        vars(state).update({name: [], f"{name}_val": val, f"{name}_idx": idx})
    about: dict[str, Any] = {}
    manager = object.__new__(TokenizerManager)
    manager.add_logprob_to_meta_info(about, state, TOP, None, asked.return_text_in_logprobs, True)
    return {"asked": asked.top_logprobs_num, "answer": {"meta_info": about}}


def _child(runtime: str) -> None:
    """Answer of the runtime to the request on stdin."""
    sys.path[:] = [at for at in sys.path if Path(at or ".").resolve() != Path(__file__).parent]
    from qconvert.runtimes.loader.server import sglang_loader, stubs, vllm_loader

    loader: Any = {"vllm": vllm_loader, "sglang": sglang_loader}[runtime]
    uvloop: Any = ModuleType("uvloop")  # a server's loop, which no function here has need of
    uvloop.EventLoopPolicy = asyncio.DefaultEventLoopPolicy
    sys.modules["uvloop"] = uvloop
    stubs.install(frozenset({"setuptools"}))
    loader._import_all((9, 0))
    made = {"vllm": _vllm, "sglang": _sglang}[runtime](json.load(sys.stdin))
    sys.stdout.write("\nMADE" + json.dumps(made))


def made(runtime: str, request: dict[str, Any]) -> dict[str, Any]:
    """Answer of the runtime to a request."""
    from loaders.client import PYTHON

    done = subprocess.run(
        [PYTHON, __file__, runtime], input=json.dumps(request), capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.rpartition("MADE")[2])
    return found


def checked(runtime: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Answer of the runtime to the request that `ask` sends, whose answer `ask` reads as the numbers
    that it was made from; and that of the tests' own server."""
    import model_server

    from qconvert.client import served

    server = served.Server("http://h", runtime, None, "m", None)  # type: ignore[arg-type]
    _, request = served._request(server, IDS, len(ADDED))
    top = {"prompt_logprobs": TOP, "logprobs": TOP, "top_logprobs_num": TOP}
    request |= {name: value for name, value in top.items() if name in request}
    found = made(runtime, request)
    read = {"vllm": served._of_vllm, "sglang": served._of_sglang}[runtime](found["answer"], IDS)
    every = [*read.prompt, *read.new]
    assert [one.token for one in every] == [*IDS[1:], *ADDED]
    assert [one.logprobs for one in every] == ROWS
    ours = {"vllm": model_server.as_vllm, "sglang": model_server.as_sglang}[runtime]
    return found, ours(model_server.Computed([*IDS, *ADDED], len(ADDED), ROWS), request)


def _same(ours: Any, theirs: Any) -> bool:
    """Tell whether the tests' server answers as the runtime does, but for ranks."""
    if isinstance(ours, dict):
        return all(name == "rank" or _same(value, theirs[name]) for name, value in ours.items())
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return bool(ours == theirs)


def test_vllm_takes_the_request_and_answers_so() -> None:
    found, ours = checked("vllm")
    assert found["extra"] == []  # no field that it does not know
    assert found["params"] == {
        "prompt_logprobs": TOP, "logprobs": TOP, "ignore_eos": True, "max_tokens": len(ADDED)
    }  # fmt: skip
    for answer in (ours, found["answer"]):
        answer["id"] = answer["choices"][0]["logprobs"]["text_offset"] = None
    assert _same(ours, found["answer"])


def test_sglang_takes_the_request_and_answers_so() -> None:
    found, ours = checked("sglang")
    assert found["asked"] == TOP
    names = [name for name in ours["meta_info"] if name.endswith("logprobs")]
    assert len(names) == 4
    assert all(_same(ours["meta_info"][name], found["answer"]["meta_info"][name]) for name in names)


def test_sglang_compares_with_the_checksums(tmp_path: Path) -> None:
    """Its verifier as its loader calls it; the file alone, since its package imports the engine."""
    from checkpoints import bf16_moe
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    from loaders.client import PYTHON
    from qconvert import api

    folder, key, sums = (tmp_path / name for name in ("model", "key.pem", "sums.json"))
    bf16_moe().write(folder)
    private = ec.generate_private_key(ec.SECP256R1())
    key.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    api.sign(folder, key, checksums=sums)
    (packages,) = (PYTHON.parent.parent / "lib").glob("python*/site-packages")
    verifier = packages / "sglang/srt/utils/model_file_verifier.py"

    def verdict() -> subprocess.CompletedProcess[str]:
        words = ("verify", "--model-path", folder, "--model-checksum", sums)
        command: list[str | Path] = [PYTHON, verifier, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = verdict()
    assert (done.returncode, "files verified successfully" in done.stdout) == (0, True)
    (folder / "config.json").write_text("{}")
    done = verdict()
    assert (done.returncode, "config.json: mismatch" in done.stderr) == (1, True)


if __name__ == "__main__":
    _child(sys.argv[1])
