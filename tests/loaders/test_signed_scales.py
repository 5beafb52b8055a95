"""Scales below 0 in the memory of sglang's and vLLM's own loaders: those of the file, in its order. What
kernels do with them afterwards needs a GPU; their sources were read (matrices of the card)."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
from checkpoints import read_tensors

from loaders.client import PYTHON, Loaded, Server
from loaders.folders import assert_whole, converted, source

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs sglang's loader: make loaders"),
]

FORMS = {
    "g128": ("--scales", "search"),
    "g32": ("--scales", "search", "--group-size", "32"),
    "channel": ("--scales", "search", "--group-size", "channel"),
    "gptq": ("--scales", "search", "--packing", "gptq"),
}
_EXPERT = re.compile(
    r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)\.(weight_scale|scales|weight_packed|qweight)"
)
Array = np.ndarray[tuple[int, ...], np.dtype[np.uint16] | np.dtype[np.uint32]]


@pytest.mark.parametrize("form", FORMS)
def test_sglang_holds_them_as_the_file_does(form: str, hopper: Server, folders: Path) -> None:
    _check(form, hopper, folders, ("_g_idx", "_g_idx_sort_indices"))


@pytest.mark.skipif(
    not (PYTHON.parent.parent / "vllm").is_dir(), reason="needs vLLM's loader: make loaders"
)
@pytest.mark.parametrize("form", FORMS)
def test_vllm_holds_them_as_the_file_does(form: str, vllm: Server, folders: Path) -> None:
    _check(form, vllm, folders, (".w13_bias", ".w2_bias") if form == "gptq" else ())


def _check(form: str, server: Server, folders: Path, unwritten: tuple[str, ...]) -> None:
    origin = source(folders, "qwen3_moe")
    out = converted(folders, "w4a16 --rtn", origin, *FORMS[form])
    loaded = server.load(out)
    assert_whole(loaded, "qwen3_moe", unread=(".g_idx",), unwritten=unwritten)
    layers = sorted({layer for layer, _, _, _ in _experts(out)})
    assert layers
    for layer in layers:
        for name in ("w13", "w2"):
            for part in ("scales", "codes"):
                digest, shapes = _held(loaded, layer, name, part)
                assert digest in _expected(out, layer, name, part).values(), (layer, name, shapes)


def _experts(folder: Path) -> dict[tuple[int, int, str, str], Array]:
    """Scales and codes by layer, expert, projection and part."""
    found: dict[tuple[int, int, str, str], Array] = {}
    for name, one in read_tensors(folder).items():
        match = _EXPERT.fullmatch(name)
        if match:
            layer, expert, projection, suffix = match.groups()
            part = "scales" if "scale" in suffix else "codes"
            kind = "<u2" if part == "scales" else "<u4"
            values = np.frombuffer(one.data, kind).reshape(one.shape)
            # One orientation: rows of the matrix first.
            values = values.T if suffix in ("scales", "qweight") else values
            found[int(layer), int(expert), projection, part] = values
    return found


def _expected(folder: Path, layer: int, name: str, part: str) -> dict[str, str]:
    """Digests of all experts' values, columns first as Marlin's parameters are, and rows first; of fp16
    scales also in bf16, in which vLLM holds them where the model is in bf16."""
    held = _experts(folder)
    count = 1 + max(expert for at, expert, _, _ in held if at == layer)
    names = ("gate_proj", "up_proj") if name == "w13" else ("down_proj",)
    each = [
        np.concatenate([held[layer, expert, one, part] for one in names]) for expert in range(count)
    ]
    stack = np.stack(each)
    if part == "scales":
        below = float(np.mean(stack >> 15))
        assert 0.2 < below < 0.8, below
    ways: dict[str, Array] = {"as stored": stack}
    if part == "scales" and any(name.endswith(".scales") for name in read_tensors(folder)):
        ways["in bf16"] = _bf16(stack.view(np.float16))
    return {
        f"{way}, {order}": hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]
        for way, held_so in ways.items()
        for order, values in (
            ("rows first", held_so),
            ("columns first", held_so.transpose(0, 2, 1)),
        )
    }


def _bf16(values: np.ndarray[tuple[int, ...], np.dtype[np.float16]]) -> Array:
    bits = values.astype(np.float32).view(np.uint32)
    rounded: Array = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return rounded


def _held(loaded: Loaded, layer: int, name: str, part: str) -> tuple[str, object]:
    ends = {"scales": ("weight_scale", "scales"), "codes": ("weight_packed", "qweight")}[part]
    found = [
        value
        for key, value in loaded.parameters.items()
        if f".layers.{layer}." in key and key.endswith(tuple(f"{name}_{end}" for end in ends))
    ]
    assert len(found) == 1, [key for key in loaded.parameters if f".layers.{layer}." in key]
    return found[0][2], found[0][:2]
