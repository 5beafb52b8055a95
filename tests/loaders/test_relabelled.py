"""What `relabel` makes, in sglang's and vLLM's own loaders, with the options that its card prints. Skips
itself without its environment (`make loaders`)."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from encoded_models import mxfp4, near

from loaders.client import PYTHON, Rank, Server
from loaders.folders import assert_whole, converted, source
from loaders.published import published
from loaders.test_sglang_quantized import launch_flags

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs a runtime's loader: make loaders"),
]


@dataclass(frozen=True)
class Cell:
    """A published checkpoint, what makes it a quantized one ("": it is), and what it becomes."""

    family: str
    fp8: bool
    command: str
    to: str


CELLS = {
    "gptq to compressed-tensors": Cell(
        "qwen3_moe", False, "w4a16 --rtn --packing gptq", "compressed-tensors"
    ),
    "compressed-tensors to gptq": Cell("glm4_moe", False, "w4a16 --rtn", "gptq"),
    "linears to gptq-v2": Cell("qwen3_next", False, "w4a16 --rtn --targets Linear", "gptq-v2"),
    "linears to compressed-tensors": Cell(
        "deepseek_v3", False, "w4a16 --rtn --packing gptq-v2 --targets Linear", "compressed-tensors"
    ),
    "nvfp4 to compressed-tensors": Cell(
        "glm4_moe", False, "nvfp4 --dialect modelopt", "compressed-tensors --nearest"
    ),
    "nvfp4 to modelopt": Cell(
        "qwen3_moe", False, "nvfp4 --dialect compressed-tensors", "modelopt --nearest"
    ),
    "fp8 to compressed-tensors": Cell("qwen3_moe", True, "", "compressed-tensors"),
    "fp8 of compressed-tensors": Cell(
        "qwen3_5_moe_text", False, "fp8 --dialect compressed-tensors", "fp8"
    ),
    "mxfp4 to fp8": Cell("qwen3_moe", False, "mx", "fp8"),
    "mxfp4 to nvfp4": Cell("qwen3_moe", False, "mx", "nvfp4 --dialect modelopt --input-scale 1.0"),
    "mxfp4 to packed nvfp4": Cell("glm4_moe", False, "mx", "nvfp4 --dialect compressed-tensors"),
}
# GPTQ's g_idx is read for act-order only; weight-only NVFP4 has no input scales; vLLM drops biases that
# no tensor has (as in test_vllm.py and test_sglang_quantized.py).
_UNREAD = (".g_idx",)
_UNWRITTEN = (
    "input_scale", "input_global_scale", "w13_bias", "w2_bias", "_g_idx", "_g_idx_sort_indices",
    "_blockscale_swizzled",
)  # fmt: skip
cells = pytest.mark.parametrize("name", CELLS)


def _made(name: str, folders: Path) -> Path:
    cell = CELLS[name]
    folder = source(folders, cell.family, fp8=cell.fp8)
    if cell.command:
        command, *options = cell.command.split()
        folder = converted(folders, command, folder, *options)
    return converted(folders, "relabel", folder, "--to", *cell.to.split())


@cells
@pytest.mark.parametrize("rank", [Rank(), Rank(2, 1)], ids=str)
def test_sglang_loads_it(
    name: str, rank: Rank, hopper: Server, blackwell: Server, folders: Path
) -> None:
    cell, out = CELLS[name], _made(name, folders)
    flags = launch_flags(out)
    # Experts in GPTQ's packing load, and sglang's kernel refuses them at the first token.
    assert (flags is None) == cell.to.startswith("gptq")
    server = blackwell if "nvfp4" in name else hopper
    loaded = server.load(out, rank, flags=flags or {})
    assert_whole(loaded, cell.family, unread=_UNREAD, unwritten=_UNWRITTEN)


@cells
@pytest.mark.skipif(not (PYTHON.parent.parent / "vllm").is_dir(), reason="needs vLLM's loader")
def test_vllm_loads_it(name: str, vllm: Server, folders: Path) -> None:
    cell, out = CELLS[name], _made(name, folders)
    for rank in (Rank(), Rank(2, 1)):
        loaded = vllm.load(out, rank)
        assert_whole(loaded, cell.family, unread=_UNREAD, unwritten=_UNWRITTEN)


@pytest.mark.parametrize("rank", [Rank(), Rank(2, 1)], ids=str)
def test_sglang_loads_experts_beside_fp8(rank: Rank, blackwell: Server, folders: Path) -> None:
    """MXFP4 experts as DeepSeek-V4 has them, in DeepSeek-V3's class, whose FP8 layers sglang builds on a
    CPU: NVFP4 experts by `moe_quant_algo`. vLLM 0.33 reads that for DeepSeek-V4 alone."""
    origin = folders / "experts beside fp8"
    if not origin.is_dir():
        model = published("deepseek_v3", fp8=True)
        for name in [name for name in model.tensors if ".experts." in name]:
            value = model.tensors.pop(name)
            if name.endswith(".weight"):
                random = np.random.default_rng(zlib.crc32(name.encode()))
                parts, _ = mxfp4(("weight", "scale"), ("I8", "F8_E8M0"))(random, *value.shape)
                module = name.removesuffix(".weight")
                model.tensors |= {f"{module}.{part}": one for part, one in parts.items()}
        near(model).write(origin, 1)
    form = ("--to", "nvfp4", "--dialect", "modelopt", "--input-scale", "1.0")
    out = converted(folders, "relabel", origin, *form)
    loaded = blackwell.load(out, rank, flags=launch_flags(out) or {})
    assert_whole(loaded, "deepseek_v3", unwritten=_UNWRITTEN)
    assert any("NvFp4FusedMoE" in scheme for scheme in loaded.schemes.values())
