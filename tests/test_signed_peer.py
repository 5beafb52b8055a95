"""Scales below 0 in the hands of other projects: kt-kernel 0.7.2 computes with a folder's INT4 experts
as they are, in compressed-tensors' form (RAWINT4) and GPTQ's, against numpy in float64;
compressed-tensors 0.19 decompresses them, AutoRound 0.15 makes such scales itself. transformers:
test_w4a16_peer.py, by its case "W4 g32 searched"; loaders of sglang and vLLM:
loaders/test_signed_scales.py.

Run with `pytest -m peer tests/test_signed_peer.py`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import int_forms
import numpy as np
import pytest
import torch
from checkpoints import read_tensors, run_cli
from compressed_peer import decompressed
from kt_layer import Floats, error_of_kt, heavy_tailed_experts
from kt_machine import needs_avx512

from qconvert.cli.demo import heavy_tailed

pytestmark = pytest.mark.peer


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heavy_tailed_experts().write(tmp_path_factory.mktemp("signed") / "source")


def packed(source: Path, out: Path, *options: str) -> Path:
    done = run_cli(
        "w4a16", source, out, "--rtn", "--scales", "search", *options, "--jobs", "1"
    )  # fmt: skip
    assert done.code == 0, done.err
    return out


def meant(folder: Path) -> dict[str, Floats]:
    """What each expert's matrix means, read with numpy alone, some of its scales being below 0."""
    found: dict[str, Floats] = {}
    tensors = read_tensors(folder)
    kinds = {"I32": "<i4", "BF16": "<u2", "F16": "<f2", "I64": "<i8"}
    for name in tensors:
        module, _, last = name.rpartition(".")
        if ".experts." not in name or last not in ("weight_packed", "qweight"):
            continue
        parts = {
            part.rpartition(".")[2]: np.frombuffer(one.data, kinds[one.dtype]).reshape(one.shape)
            for part, one in tensors.items()
            if part.rpartition(".")[0] == module
        }
        turned = last == "qweight"
        if not turned:
            bits = parts["weight_scale"].astype(np.uint32) << 16
            parts["weight_scale"] = bits.view(np.float32)
        columns = parts[last].shape[0 if turned else 1] * 8
        values = (
            int_forms.from_gptq(parts, 4, 1)
            if turned
            else int_forms.from_compressed_tensors(parts, 4, columns)
        )
        below = np.mean(parts["scales" if turned else "weight_scale"] < 0)
        assert 0.2 < below < 0.8, (name, below)
        found[module] = values.astype(np.float64)
    return found


@needs_avx512
@pytest.mark.parametrize(
    ("method", "options", "backend"),
    [
        ("RAWINT4", ("--group-size", "32"), ""),
        ("GPTQ_INT4", ("--packing", "gptq"), ""),
        # RAWINT4 crashes in kt-kernel 0.7.2's AVX2 form, which reads weights that its wrapper has freed,
        # and in groups of 128 its AVX512 form crashes or gives NaN: positive scales or not.
        ("GPTQ_INT4", ("--packing", "gptq"), "avx2"),
    ],
)
def test_kt_kernel_computes_with_them(
    method: str, options: tuple[str, ...], backend: str, source: Path, tmp_path: Path
) -> None:
    out = packed(source, tmp_path / "out", *options)
    environment = {"KT_GPTQ_INT4_BACKEND": backend} if backend else {}
    assert error_of_kt(method, out, meant(out), tmp_path, **environment) < 0.03


@pytest.mark.parametrize("group", ["32", "128"])
def test_compressed_tensors_decompresses_them(group: str, source: Path, tmp_path: Path) -> None:
    out = packed(source, tmp_path / "out", "--group-size", group)
    theirs = decompressed(out)
    for module, values in meant(out).items():
        ours = torch.from_numpy(values).bfloat16()
        assert torch.equal(theirs[f"{module}.weight"], ours), module


def test_auto_round_makes_such_scales() -> None:
    """So published checkpoints hold them, and runtimes meet them."""
    theirs: Any = importlib.import_module("auto_round.data_type.int")
    weight = heavy_tailed((64, 256), torch.Generator().manual_seed(1))
    _, scale, _ = theirs.quant_tensor_opt_rtn_sym(weight, bits=4, group_size=32)
    assert 0.2 < float((scale < 0).float().mean()) < 0.8
