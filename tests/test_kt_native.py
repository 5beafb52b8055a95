"""`kt --cpu` in the forms that kt-kernel reads from a checkpoint: which steps lead there, codes that are
repacked and not quantized again, and its own client on the result (`pytest -m peer`)."""

from __future__ import annotations

from pathlib import Path

import headers
import numpy as np
import pytest
from checkpoints import ran, read_tensors, run_cli
from encoded_models import encoded
from header_checkpoints import checkpoint
from int_models import INTEGERS
from kt_layer import Floats, error_of_kt, heavy_tailed_experts
from kt_machine import needs_avx512
from made_once import made_once
from sampled import sampled

from qconvert import api
from qconvert.core.dtypes import TensorType
from qconvert.runtimes.ktransformers import ENVIRONMENT, METHOD, NATIVE, Native, reads_as_it_is


def source(*words: str) -> Path:
    """A model in BF16, or what a command makes of it."""
    if not words:
        return made_once("kt-native", lambda at: heavy_tailed_experts().write(at))
    name = f"kt-native {' '.join(words)}"
    return made_once(name, lambda at: ran(words[0], source(), at, *words[1:], "--jobs", "1"))


def kt(method: str, origin: Path, out: Path, *more: str, code: int = 0) -> str:
    words: tuple[str | Path, ...] = (
        "--cpu-out", out, "--cpu", method, "--numa", "1", "--jobs", "1", *more,
    )  # fmt: skip
    done = run_cli("kt", origin, *words)
    assert done.code == code, done.err
    return done.out + done.err


def meant(folder: Path, room: Path) -> dict[str, Floats]:
    """Values of each matrix: exact in BF16, or rounded to it once more."""
    at = folder
    if (folder / "config.json").read_text().count("quantization_config"):
        at = room / "meant"
        ran("dequant", folder, at, "--dtype", "f32", "--jobs", "1")
    found: dict[str, Floats] = {}
    for name, one in read_tensors(at).items():
        if ".experts." in name:
            bits = np.frombuffer(one.data, "<u2" if one.dtype == "BF16" else "<f4")
            values = bits if one.dtype == "F32" else (bits.astype(np.uint32) << 16).view(np.float32)
            found[name.removesuffix(".weight")] = values.reshape(one.shape).astype(np.float64)
    return found


@pytest.mark.parametrize("method", sampled(NATIVE, 2))
def test_it_is_read_as_it_is(method: Native, tmp_path: Path) -> None:
    origin = source("fp8") if method == "bf16" else source()
    said = kt(method, origin, tmp_path / "out")
    assert reads_as_it_is(api.open_checkpoint(tmp_path / "out")) == METHOD[method]
    line = next(one for one in said.splitlines() if "sglang.launch_server" in one)
    assert f"--model {tmp_path / 'out'} --kt-weight-path {tmp_path / 'out'}" in line
    assert f"--kt-method {METHOD[method]} --kt-threadpool-count 1" in line
    # What it is then, nobody has to make again.
    assert "nothing is written" in kt(method, tmp_path / "out", tmp_path / "again")
    assert not (tmp_path / "again").exists()


FORMS = {
    "gptq": ("w4a16", "--rtn", "--packing", "gptq", "--group-size", "32"),
    "packed": ("w4a16", "--rtn", "--group-size", "32"),
    "nvfp4": ("nvfp4", "--dialect", "compressed-tensors", "--weight-only"),
}


@pytest.mark.parametrize(("form", "method"), [
    ("gptq", "rawint4"), ("packed", "gptq-int4"), ("nvfp4", "nvfp4"),
])  # fmt: skip
def test_codes_are_repacked(form: str, method: Native, tmp_path: Path) -> None:
    more = ("--dry-run",) if form == "nvfp4" else ()
    said = kt(method, source(*FORMS[form]), tmp_path / "out", *more)
    assert "relabel" in said
    if not more:
        first, second = (
            meant(source(*FORMS[form]), tmp_path),
            meant(tmp_path / "out", tmp_path / "b"),
        )
        assert first.keys() == second.keys()
        assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("form", "method"), [
    ("auto_gptq", "gptq-int4"), ("gptqmodel", "rawint4"),
])  # fmt: skip
def test_auto_rounds_codes_are_never_quantized_again(
    form: str, method: Native, tmp_path: Path
) -> None:
    """Its words are GPTQ's: read as they are, or repacked to the same values."""
    model, wanted = encoded("qwen3_moe", INTEGERS[form])
    origin = model.write(tmp_path / "source")
    said = kt(method, origin, tmp_path / "out")
    if "nothing is written" not in said:
        found = meant(tmp_path / "out", tmp_path)
        assert all(
            np.array_equal(found[n.removesuffix(".weight")], one) for n, one in wanted.items()
        )
    assert ("nothing is written" in said) == (method == "gptq-int4")


@pytest.mark.parametrize(("method", "words", "why"), [
    ("rawint4", ("--gpu", "w4a16", "--gpu-out", "gpu"), "one folder for both sides"),
    ("fp8", ("--gptq", "--synthetic"), "codes of INT4, and none are made"),
])  # fmt: skip
def test_what_is_refused(method: str, words: tuple[str, ...], why: str, tmp_path: Path) -> None:
    done = run_cli(
        "kt", source(), "--cpu-out", tmp_path / "out", "--cpu", method, "--numa", "1", *words
    )
    assert done.code
    assert why in done.err


@pytest.mark.peer
@needs_avx512
@pytest.mark.parametrize("method", NATIVE)
def test_kt_kernel_computes_with_it(method: Native, tmp_path: Path) -> None:
    out = source() if method == "bf16" else tmp_path / "out"
    if method != "bf16":
        kt(method, source(), out)
    environment = dict(word.split("=") for word in ENVIRONMENT.get(METHOD[method], "").split())
    error = error_of_kt(METHOD[method], out, meant(out, tmp_path), tmp_path, **environment)
    assert error < 0.03


def test_published_forms_under_the_names_that_it_looks_for() -> None:
    """DeepSeek-V4's MXFP4, and MXFP8 where MiniMax has it; under other names none is found."""
    file = Path(__file__).parent / "families" / "published" / "deepseek-v4-flash.yaml"
    v4 = headers.with_few(headers.read(file))
    assert reads_as_it_is(checkpoint(v4.tensors, v4.config)) == "MXFP4"
    at = "model.layers.0.block_sparse_moe.experts"
    found = {
        f"{at}.{expert}.{name}.{end}": TensorType(dtype, (64, columns))
        for expert in range(2) for name in ("w1", "w2", "w3")
        for end, dtype, columns in (("weight", "F8_E4M3", 64), ("weight_scale_inv", "U8", 2))
    }  # fmt: skip
    config = {"model_type": "minimax_m2", "num_local_experts": 2, "num_hidden_layers": 1}
    assert reads_as_it_is(checkpoint(found, config)) == "MXFP8"
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    other = {
        f"model.layers.0.mlp.experts.{expert}.{names[name]}.{end}": TensorType(dtype, (64, columns))
        for expert in range(2) for name in names
        for end, dtype, columns in (("weight", "U8", 32), ("scale", "U8", 2))
    }  # fmt: skip
    config = {"model_type": "qwen3_moe", "num_experts": 2, "num_hidden_layers": 1}
    assert reads_as_it_is(checkpoint(other, config)) is None
