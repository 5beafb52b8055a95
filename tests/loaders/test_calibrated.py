"""Calibrated codes in sglang's and vLLM's own loaders: NVFP4 of `nvfp4 --gptq`, INT4 of `w4a16 --gptq`
with all linears. They load whole, into the parameters that rounded ones fill, and what is then in memory
is what the file holds.

The calibration runs here, the loader in its own environment (`make loaders`)."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from checkpoints import Tensor, read_tensors

from loaders.client import PYTHON, Loaded, Server
from loaders.folders import assert_whole, converted, is_draft, source

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs sglang's loader: make loaders"),
    pytest.mark.skipif(
        importlib.util.find_spec("llmcompressor") is None, reason="calibrates: make peers"
    ),
]
needs_vllm = pytest.mark.skipif(
    not (PYTHON.parent.parent / "vllm").is_dir(), reason="needs vLLM's loader: make loaders"
)
GPTQ = ("--gptq", "--synthetic", "--samples", "4", "--length", "48", "--device", "cpu")
# No activations are quantized, so their scales are never filled; kernels sort by no group indices.
UNWRITTEN = (
    "_input_global_scale", "input_scale", "input_global_scale", "_blockscale_swizzled", "_g_idx",
    "_g_idx_sort_indices",
)  # fmt: skip
CELLS = [
    ("qwen3_moe", "nvfp4 --dialect modelopt"),
    ("qwen3_moe", "nvfp4 --dialect compressed-tensors"),
    ("qwen3_next", "nvfp4 --dialect modelopt"),
    ("glm4_moe", "nvfp4 --dialect compressed-tensors --shared-experts keep"),
    ("qwen3_next", "w4a16 --targets Linear"),
    ("deepseek_v3", "w4a16 --targets Linear"),
]
# Codes and scales: NVFP4's in modelopt's dialect are called `weight`.
PARTS = ("weight_packed", "weight", "weight_scale")
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.(\w+)")


@pytest.mark.parametrize(("family", "command"), CELLS)
def test_sglang_holds_what_the_file_does(
    family: str, command: str, blackwell: Server, hopper: Server, folders: Path
) -> None:
    """Shared experts apart: fused, they are one more of the routed ones."""
    server = blackwell if command.startswith("nvfp4") else hopper
    flags = {"disable_shared_experts_fusion": True}
    _check(server, family, command, folders, flags if family != "qwen3_moe" else {})


@needs_vllm
@pytest.mark.parametrize(("family", "command"), CELLS)
def test_vllm_holds_what_the_file_does(
    family: str, command: str, vllm: Server, folders: Path
) -> None:
    _check(vllm, family, command, folders, {})


def _check(
    server: Server, family: str, command: str, folders: Path, flags: dict[str, bool]
) -> None:
    origin = source(folders, family)
    rounding = "--rtn" if command.startswith("w4a16") else "--weight-only"
    plain = server.load(converted(folders, command, origin, rounding), flags=flags)
    out = converted(folders, command, origin, *GPTQ)
    loaded = server.load(out, flags=flags)
    for one in (plain, loaded):
        assert_whole(one, family, unwritten=UNWRITTEN)
    assert {name: found[:2] for name, found in loaded.parameters.items()} == {
        name: found[:2] for name, found in plain.parameters.items()
    }
    assert loaded.schemes == plain.schemes
    changed = {n for n, found in loaded.parameters.items() if found != plain.parameters[n]}
    held = read_tensors(out)
    layers = sorted({m[1] for name in held if (m := _EXPERT.fullmatch(name))})
    layers = [layer for layer in layers if not is_draft(f"{layer}.", family)]
    assert layers
    seen = 0
    for layer, part, kind in itertools.product(layers, PARTS, ("w13", "w2")):
        name, wanted = (
            _parameter(loaded, layer, f"{kind}_{part}"),
            _digests(held, layer, kind, part),
        )
        assert (name is not None) == bool(wanted)
        if name is not None:
            assert loaded.parameters[name][2] in wanted, name
            assert name in changed
            seen += 1
    assert seen == 4 * len(layers)


def _parameter(loaded: Loaded, layer: str, end: str) -> str | None:
    """The one of a layer's experts that ends so."""
    number = f".layers.{layer.split('.layers.')[1].split('.')[0]}."
    found = [n for n in loaded.parameters if number in n and n.endswith(f".{end}")]
    assert len(found) <= 1, found
    return found[0] if found else None


def _digests(held: dict[str, Tensor], layer: str, kind: str, suffix: str) -> set[str]:
    """Of all experts' bytes, gate before up and up before gate, as stored or columns first."""
    count = 1 + max(int(m[2]) for name in held if (m := _EXPERT.fullmatch(name)) and m[1] == layer)
    parts = ("gate_proj", "up_proj") if kind == "w13" else ("down_proj",)
    found = set()
    for order in itertools.permutations(parts):
        each = []
        for expert in range(count):
            tensors = [held.get(f"{layer}.experts.{expert}.{part}.{suffix}") for part in order]
            each += [
                np.frombuffer(one.data, np.uint8).reshape(one.shape[0], one.shape[1], -1)
                for one in tensors
                if one is not None
            ]
        if each:
            rows = sum(one.shape[0] for one in each) // count
            stack = np.concatenate(each).reshape(count, rows, *each[0].shape[1:])
            for ordered in (stack, stack.transpose(0, 2, 1, 3)):
                data = np.ascontiguousarray(ordered).tobytes()
                found.add(hashlib.sha256(data).hexdigest()[:16])
    return found


KV = ("--kv-scale", "calibrated", *GPTQ[1:])


@pytest.mark.parametrize("command", ["fp8 --channel", "nvfp4 --dialect modelopt --weight-only"])
def test_sglang_holds_the_scales_of_the_cache(
    command: str, blackwell: Server, folders: Path
) -> None:
    _check_cache(blackwell, "qwen3_next", command, folders)


@needs_vllm
def test_vllm_holds_the_scales_of_the_cache(vllm: Server, folders: Path) -> None:
    _check_cache(vllm, "qwen3_moe", "fp8 --channel", folders)


def _check_cache(server: Server, family: str, command: str, folders: Path) -> None:
    out = converted(folders, command, source(folders, family), *KV)
    loaded = server.load(out)
    wanted = {
        re.sub(r".*layers\.(\d+)\..*([kv]_scale)", r"\1 \2", name): held.data
        for name, held in read_tensors(out).items() if name.endswith(("k_scale", "v_scale"))
    }  # fmt: skip
    found = {
        re.sub(r".*layers\.(\d+)\..*([kv]_scale)", r"\1 \2", name): digest
        for name, (_, _, digest) in loaded.parameters.items()
        if re.search(r"attn\.[kv]_scale$", name) and not is_draft(name, family)
    }
    assert wanted
    assert found == {n: hashlib.sha256(data).hexdigest()[:16] for n, data in wanted.items()}
