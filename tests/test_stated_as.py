"""Folders whose config lost its quantization block, read as the user states it (`--as`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import edit_json, read_tensors, refused, run_cli
from dequantized import errors
from encoded_models import encoded
from layer_models import mixed, plain, quark
from models import qwen3_moe

from qconvert import api
from qconvert.core.errors import CheckpointError, UsageError

MADE: dict[str, tuple[str, tuple[str, ...]]] = {
    "gptq": ("gptq:4:32", ("w4a16", "--rtn", "--group-size", "32", "--packing", "gptq")),
    "gptq of 8": (
        "gptq:8:64", ("w4a16", "--rtn", "--bits", "8", "--group-size", "64", "--packing", "gptq"),
    ),
    "int4": ("int4:32", ("w4a16", "--rtn", "--group-size", "32", "--asymmetric")),
    "int8": ("int8:-1", ("int8",)),
    "mxfp4": ("mxfp4", ("quantize", "--format", "mxfp4")),
    "mxfp8": ("mxfp8", ("quantize", "--format", "mxfp8")),
    "nvfp4": ("nvfp4", ("nvfp4", "--dialect", "compressed-tensors")),
    "nvfp4 modelopt": ("nvfp4", ("nvfp4", "--dialect", "modelopt", "--input-scale", "1.0")),
    "fp8 block": ("fp8-block:128x128", ("fp8", "--block", "128")),
    "fp8 exponents": ("fp8-block:128x128", ("fp8", "--block", "128", "--ue8m0")),
    "fp8 block ct": (
        "fp8-block:128x128", ("fp8", "--block", "128", "--dialect", "compressed-tensors"),
    ),
    "fp8 channel": ("fp8-channel", ("fp8", "--channel")),
    "fp8 tensor": ("fp8-tensor", ("fp8", "--tensor", "--dialect", "compressed-tensors")),
}  # fmt: skip


def lost(folder: Path) -> Path:
    """The folder without all that says how it is stored."""
    edit_json(folder / "config.json", lambda config: config.pop("quantization_config"))
    for name in ("qconvert.json", "qconvert.receipt.jsonl", "hf_quant_config.json"):
        (folder / name).unlink(missing_ok=True)
    return folder


def _written(write: Callable[[Path], Path], folder: Path) -> tuple[Path, Path]:
    """A folder, and the same that lost its block."""
    return write(folder / "whole"), lost(write(folder / "lost"))


def _made(case: str, folder: Path) -> tuple[Path, Path]:
    source = plain().write(folder / "bf16")

    def write(out: Path) -> Path:
        command, *options = MADE[case][1]
        done = run_cli(command, source, out, "--jobs", "1", *options)
        assert done.code == 0, done.err
        return out

    return _written(write, folder)


def read_alike(whole: Path, stripped: Path, scheme: str, folder: Path) -> None:
    first, second = folder / "first", folder / "second"
    assert run_cli("dequant", whole, first, "--jobs", "1").code == 0
    if scheme != "nvfp4":  # whose names and types say what it is
        assert run_cli("dequant", stripped, second, "--jobs", "1").code == 1
    done = run_cli("dequant", stripped, second, "--jobs", "1", "--as", scheme)
    assert done.code == 0, done.err
    assert read_tensors(first) == read_tensors(second)
    assert json.loads((second / "qconvert.json").read_bytes())["stated_as"] == scheme
    assert errors(stripped, "--as", scheme) == []
    assert errors(second, "--against", stripped) == []


@pytest.mark.parametrize("case", MADE)
def test_a_stated_scheme_stands_as_the_block_did(case: str, tmp_path: Path) -> None:
    read_alike(*_made(case, tmp_path), MADE[case][0], tmp_path)


def test_forms_of_other_tools_are_stated_too(tmp_path: Path) -> None:
    for number, (model, scheme) in enumerate(
        [
            (encoded("qwen3_moe", "awq")[0], "awq:4:64"),
            (quark("MXFP4")[0], "mxfp4"),
            (mixed("W4A16_NVFP4", "W4A16_NVFP4")[0], "nvfp4"),
            (mixed("FP8_PER_CHANNEL_PER_TOKEN", "FP8_PER_CHANNEL_PER_TOKEN")[0], "fp8-channel"),
        ]
    ):
        folder = tmp_path / str(number)
        read_alike(*_written(model.write, folder), scheme, folder)


def test_what_keeps_its_codes_gets_the_block(tmp_path: Path) -> None:
    """A pass that leaves weights as they are writes the stated block into config.json."""
    _, stripped = _made("fp8 block", tmp_path)
    out = tmp_path / "out"
    done = run_cli("run", "copy", stripped, out, "--as", "fp8-block:128x128")
    assert done.code == 0, done.err
    block = json.loads((out / "config.json").read_bytes())["quantization_config"]
    assert (block["quant_method"], block["weight_block_size"]) == ("fp8", [128, 128])
    assert errors(out, "--against", stripped) == []


def test_every_command_that_opens_a_folder_takes_it(tmp_path: Path) -> None:
    _, stripped = _made("fp8 block", tmp_path)
    scheme = ("--as", "fp8-block:128x128")
    assert "fp8" in run_cli("inspect", stripped, *scheme).out
    for number, words in enumerate(
        [
            ("w4a16", "--rtn"), ("quantize", "--format", "mxfp4"), ("fp8", "--channel"),
            ("relabel", "--to", "compressed-tensors"),
        ]
    ):  # fmt: skip
        command, *options = words
        done = run_cli(command, stripped, tmp_path / str(number), *options, *scheme)
        assert done.code == 0, done.err
        assert errors(tmp_path / str(number), "--against", stripped) == []


@pytest.mark.parametrize(
    ("case", "scheme", "said"),
    [
        ("fp8 block", "fp8-block:64x64", "of scales [2, 4]"),
        ("fp8 block", "fp8-channel", "--as fp8-channel is of scales"),
        ("fp8 block", "fp8-tensor", "--as fp8-tensor is of scales"),
        ("fp8 channel", "fp8-tensor", "--as fp8-tensor is of scales"),
        ("fp8 channel", "mxfp8", "--as mxfp8 is of scales"),
        ("fp8 block", "gptq:4:128", "*.qweight in I32, and there are none"),
        ("gptq", "gptq:4:64", "in groups of 64, found"),
        ("gptq", "gptq:8:32", "qzeros"),
        ("gptq", "awq:4:32", "scales"),
        ("int4", "int4:64", "weight_scale"),
        ("mxfp4", "nvfp4", "*.weight_scale_2 in F32 or *.weight_global_scale in F32"),
        ("nvfp4", "mxfp4", "says that it is NVFP4, and --as mxfp4 that it is MXFP4"),
    ],
)
def test_a_scheme_that_the_tensors_deny_is_refused(
    case: str, scheme: str, said: str, tmp_path: Path
) -> None:
    _, stripped = _made(case, tmp_path)
    assert said in refused("dequant", stripped, tmp_path / "out", "--as", scheme)


def test_a_config_that_states_a_block_is_not_overruled(tmp_path: Path) -> None:
    source = qwen3_moe("fp8").write(tmp_path / "in")
    said = refused("dequant", source, tmp_path / "out", "--as", "fp8-block:64x64")
    assert "states quant_method 'fp8', and --as fp8-block:64x64 is for folders" in said


@pytest.mark.parametrize(
    "scheme",
    [
        "", "fp8", "fp8-block", "fp8-block:0x1", "gptq:4", "gptq:9:1", "awq:3:128", "int4", "int4:0",
        "mxfp4:1",
    ],
)  # fmt: skip
def test_an_unknown_scheme_is_a_usage_error(scheme: str, tmp_path: Path) -> None:
    done = run_cli("dequant", tmp_path, tmp_path / "out", "--as", scheme)
    assert done.code == 2
    assert "is no scheme; schemes are fp8-tensor," in done.err


def test_programs_state_it_around_what_they_open(tmp_path: Path) -> None:
    _, stripped = _made("fp8 block", tmp_path)
    with api.reading_as(scheme="fp8-block:128x128"):
        opened = api.open_checkpoint(stripped)
    assert opened.stated_as == "fp8-block:128x128"
    assert not api.open_checkpoint(stripped).quantization_configs
    with pytest.raises(UsageError), api.reading_as(scheme="nope"):
        pass
    with (
        api.reading_as(architecture="Qwen3MoeForCausalLM", scheme="mxfp8"),
        pytest.raises(CheckpointError, match="mxfp8 is of scales"),
    ):
        api.open_checkpoint(stripped)
