"""Broken repos of NVFP4: see tests/broken_repos.py. Each is what the real command made, or a copy of
that with a part of another conversion."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from broken_contents import unhashed
from broken_repos import (
    CONFIG,
    SOUND,
    Bench,
    Repo,
    broken,
    change,
    edit_config,
    home,
    overwrite,
    sound,
)
from checkpoints import Tensor, edit_header, read_tensors, run_cli, write_shard
from models import deepseek_v3, qwen3_moe

from qconvert.cli.demo import heavy_tailed

EXPERTS, HIDDEN, INTERMEDIATE = 2, 128, 256


# --- Sound repos, by the real commands -----------------------------------------------------------


@sound()
def _to_quantize(bench: Bench, out: Path) -> None:
    """bf16 with heavy-tailed rows and outlier channels."""
    model, generator = qwen3_moe(), torch.Generator().manual_seed(3)
    for name, value in model.tensors.items():
        if len(value.shape) == 2:
            drawn = heavy_tailed(value.shape, generator).bfloat16().view(torch.int16)
            model.tensors[name] = Tensor("BF16", value.shape, drawn.numpy().tobytes())
    model.write(out)


@sound()
def _to_quantize_fp8(bench: Bench, out: Path) -> None:
    deepseek_v3().write(out)


def statistics(folder: Path) -> Path:
    """What a calibration's --save-stats leaves of layers 0 and 1: the largest size of each input."""
    folder.mkdir()
    random = np.random.default_rng(7)
    for layer in range(2):
        tensors = {}
        for kind, width in (("gate_up", HIDDEN), ("down", INTERMEDIATE)):
            seen = np.abs(random.standard_t(4, (EXPERTS, width))).astype(np.float32) + 1
            tensors[f"layers.{layer}.{kind}.absmax"] = Tensor("F32", seen.shape, seen.tobytes())
        write_shard(folder / f"layer-{layer:05d}.safetensors", tensors)
    return folder


def quantized(name: str, source: str, dialect: str, *more: str, stats: bool = False) -> None:
    """Note a sound repo that `qconvert nvfp4` makes."""

    def make(bench: Bench, out: Path) -> None:
        options = ["--dialect", dialect, *more]
        if stats:
            options += ["--stats", str(statistics(out.with_name(f"{name}-stats")))]
        made = run_cli("nvfp4", bench.sound(source), out, *options, "--jobs", "1")
        assert made.code == 0, made.err

    make.__name__ = name
    sound(source)(make)


def prepared(name: str, source: str) -> None:
    """Note a sound repo that `qconvert prepare` makes."""

    def make(bench: Bench, out: Path) -> None:
        made = run_cli("prepare", "trtllm-gen", bench.sound(source), out, "--jobs", "1")
        assert made.code == 0, made.err

    make.__name__ = name
    sound(source)(make)


for _short, _dialect in (("mo", "modelopt"), ("ct", "compressed-tensors")):
    quantized(f"nvfp4_{_short}", "to_quantize", _dialect)
    quantized(f"nvfp4_{_short}_inputs", "to_quantize", _dialect, stats=True)
    quantized(f"nvfp4_{_short}_all", "to_quantize", _dialect, "--targets", "Linear")
    quantized(f"nvfp4_{_short}_fp8", "to_quantize_fp8", _dialect, "--weight-only")
    quantized(f"nvfp4_{_short}_fp8_inputs", "to_quantize_fp8", _dialect, stats=True)
    prepared(f"prepared_{_short}", f"nvfp4_{_short}")
    prepared(f"prepared_{_short}_inputs", f"nvfp4_{_short}_inputs")
    prepared(f"prepared_{_short}_fp8", f"nvfp4_{_short}_fp8_inputs")
quantized("nvfp4_ct_fp8_all", "to_quantize_fp8", "compressed-tensors", "--targets", "Linear")


# --- Weights and scales --------------------------------------------------------------------------

UP = "model.layers.1.mlp.experts.1.up_proj"
GATE = "model.layers.1.mlp.experts.1.gate_proj"
LAYER = "model.layers.1.mlp.experts"


def f32(value: float) -> bytes:
    return struct.pack("<f", value)


def edited(bench: Bench, name: str, edit: Callable[[dict[str, Tensor]], object]) -> Repo:
    """A copy with tensors changed, and what it was made from."""
    source = sound_source(name)
    return Repo(change(bench.copy(name), edit), bench.sound(source))


def sound_source(name: str) -> str:
    source = SOUND[name].source
    assert source is not None
    return source


def scaled(end: str, to: Callable[[float], float], only: str = "") -> Callable[..., None]:
    """Other numbers for scalars of that name."""

    def edit(tensors: dict[str, Tensor]) -> None:
        for name, value in tensors.items():
            if name.endswith(end) and only in name:
                (number,) = struct.unpack("<f", value.data)
                tensors[name] = Tensor("F32", value.shape, f32(to(number)))

    return edit


def stating(bench: Bench, name: str, edit: Callable[[dict[str, Any]], object]) -> Repo:
    """A copy whose quantization block says something else."""
    return Repo(edit_config(bench.copy(name), lambda c: edit(c["quantization_config"])))


@broken("QC069", "vllm#54974", level="sample")
def _gate_and_up_under_two_multipliers(bench: Bench) -> Repo:
    edit = scaled(".weight_scale_2", lambda own: own / 2, only="gate_proj")
    return Repo(edited(bench, "nvfp4_mo", edit).folder)


@broken("QC060", level="sample")
def _nibbles_in_the_other_order(bench: Bench) -> Repo:
    def swap(tensors: dict[str, Tensor]) -> None:
        value = tensors[f"{UP}.weight_packed"]
        codes = np.frombuffer(value.data, np.uint8)
        data = (codes >> 4 | codes << 4).tobytes()
        tensors[f"{UP}.weight_packed"] = Tensor("U8", value.shape, data)

    return edited(bench, "nvfp4_ct", swap)


@broken("QC060", level="full")
def _block_scales_of_the_neighbour(bench: Bench) -> Repo:
    def move(tensors: dict[str, Tensor]) -> None:
        value = tensors[f"{UP}.weight_scale"]
        data = np.roll(np.frombuffer(value.data, np.uint8).reshape(value.shape), 1, 1).tobytes()
        tensors[f"{UP}.weight_scale"] = Tensor("F8_E4M3", value.shape, data)

    return edited(bench, "nvfp4_mo_fp8", move)


@broken("QC060", level="full")
def _block_scales_twice_what_is_needed(bench: Bench) -> Repo:
    """Codes rounded under scales twice as large: all within half a step, and a bit of each is lost."""

    def double(tensors: dict[str, Tensor]) -> None:
        value, scale = tensors[f"{UP}.weight"], tensors[f"{UP}.weight_scale"]
        exponents = np.frombuffer(scale.data, np.uint8)
        assert exponents.max() <= 0x7E
        # Half of 0, 0.5, 1, 1.5, 2, 3, 4, 6 is 0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3: ties to even codes.
        half = np.array([0, 0, 1, 2, 2, 3, 4, 5], np.uint8)
        both = np.frombuffer(value.data, np.uint8)
        low, high = both & np.uint8(15), both >> np.uint8(4)
        packed = (low & 8 | half[low & 7]) | (high & 8 | half[high & 7]) << 4
        fits = exponents < 0x77
        kept = both.reshape(fits.size, 8)
        data = np.where(fits[:, None], packed.reshape(fits.size, 8), kept).astype(np.uint8)
        tensors[f"{UP}.weight"] = Tensor("U8", value.shape, data.tobytes())
        doubled = np.where(fits, exponents + 8, exponents).astype(np.uint8)
        tensors[f"{UP}.weight_scale"] = Tensor("F8_E4M3", scale.shape, doubled.tobytes())

    return edited(bench, "nvfp4_mo", double)


@broken("QC100", level="sample")
def _an_own_scale_that_is_infinite(bench: Bench) -> Repo:
    return Repo(edited(bench, "nvfp4_ct", scaled(".weight_global_scale", lambda _: np.inf)).folder)


@broken("QC100", level="sample")
def _an_input_scale_of_an_expert_that_saw_nothing(bench: Bench) -> Repo:
    edit = scaled(".input_scale", lambda _: 0.0, only=".down_proj")
    return Repo(edited(bench, "nvfp4_mo_inputs", edit).folder)


@broken("QC112", level="full")
def _an_input_scale_that_is_not_the_source_s(bench: Bench) -> Repo:
    source = bench.sound("nvfp4_mo_inputs")
    edit = scaled(".input_scale", lambda value: 1 / value, only=".down_proj")
    return Repo(edited(bench, "nvfp4_mo_inputs", edit).folder, against=source)


@broken("QC101", beside=("QC037",))
def _w4a4_said_of_weights_alone(bench: Bench) -> Repo:
    return stating(bench, "nvfp4_mo", lambda block: block.update(quant_algo="NVFP4"))


@broken("QC101")
def _w4a4_said_of_packed_weights_alone(bench: Bench) -> Repo:
    def say(block: dict[str, Any]) -> None:
        group = block["config_groups"]["group_0"]
        group["input_activations"] = {**group["weights"], "dynamic": "local"}

    return stating(bench, "nvfp4_ct_fp8_all", say)


@broken("QC102", severity="warning", beside=("QC037",))
def _weights_only_said_beside_input_scales(bench: Bench) -> Repo:
    return stating(bench, "nvfp4_mo_inputs", lambda block: block.update(quant_algo="W4A16_NVFP4"))


@broken("QC102", severity="warning")
def _no_activations_said_beside_input_scales(bench: Bench) -> Repo:
    return stating(
        bench,
        "nvfp4_ct_inputs",
        lambda block: block["config_groups"]["group_0"].pop("input_activations"),
    )


@broken("QC103", beside=("QC037",))
def _tensors_of_the_other_dialect(bench: Bench) -> Repo:
    block = json.loads((bench.sound("nvfp4_ct") / CONFIG).read_bytes())["quantization_config"]
    folder = bench.copy("nvfp4_mo")
    return Repo(edit_config(folder, lambda config: config.update(quantization_config=block)))


@broken("QC103", level="sample")
def _a_divisor_under_a_multipliers_name(bench: Bench) -> Repo:
    edit = scaled(".weight_scale_2", lambda own: 1 / own)
    return Repo(edited(bench, "nvfp4_mo", edit).folder)


@broken("QC104")
def _block_scales_of_half_the_columns(bench: Bench) -> Repo:
    def cut(tensors: dict[str, Tensor]) -> None:
        rows, columns = tensors[f"{UP}.weight_scale"].shape
        tensors[f"{UP}.weight_scale"] = Tensor("F8_E4M3", (rows, columns // 2), bytes(rows * 4))

    return Repo(edited(bench, "nvfp4_ct", cut).folder)


@broken("QC104")
def _an_own_scale_was_lost(bench: Bench) -> Repo:
    def lose(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{UP}.weight_global_scale"]

    return Repo(edited(bench, "nvfp4_ct", lose).folder)


# --- Prepared ------------------------------------------------------------------------------------


def overwritten(bench: Bench, name: str, tensor: str, data: bytes, start: int = 0) -> Repo:
    folder = unhashed(overwrite(bench.copy(name), tensor, data, start))
    return Repo(folder, bench.sound(sound_source(name)))


@broken("QC105")
def _prepared_under_the_sources_block(bench: Bench) -> Repo:
    block = json.loads((bench.sound("nvfp4_mo_inputs") / CONFIG).read_bytes())[
        "quantization_config"
    ]
    folder = bench.copy("prepared_mo_inputs")
    return Repo(edit_config(folder, lambda config: config.update(quantization_config=block)))


@broken("QC106")
def _a_marker_of_another_dialect(bench: Bench) -> Repo:
    return stating(bench, "prepared_ct", lambda block: block["layout"].update(dialect="modelopt"))


@broken("QC106")
def _a_marker_of_more_experts(bench: Bench) -> Repo:
    return stating(bench, "prepared_mo", lambda block: block["layout"].update(num_experts=4))


@broken("QC107")
def _prepared_rows_that_are_no_tiles(bench: Bench) -> Repo:
    """448 rows of w13 where 512 were."""
    name = f"{LAYER}.w13_weight"
    folder = bench.copy("prepared_mo")

    def cut(header: dict[str, Any]) -> None:
        experts, _, half = header[name]["shape"]
        header[name]["shape"] = [experts, 64, 448 * half // 64 * 512 // 448]

    edit_header(home(folder, name), cut)
    return Repo(unhashed(folder))


@broken("QC108", level="sample")
def _a_scalar_of_another_scale(bench: Bench) -> Repo:
    name = f"{LAYER}.g1_alphas"
    return Repo(overwritten(bench, "prepared_ct_inputs", name, f32(3.25)).folder)


@broken("QC109", level="full")
def _an_expert_that_was_not_shuffled(bench: Bench) -> Repo:
    tensors = read_tensors(bench.sound("nvfp4_mo"))
    first = LAYER.replace("layers.1", "layers.0") + ".0"
    data = b"".join(tensors[f"{first}.{p}.weight"].data for p in ("gate_proj", "up_proj"))
    return overwritten(bench, "prepared_mo", f"{first.removesuffix('.0')}.w13_weight", data)


@broken("QC109", level="full")
def _block_scales_that_were_not_interleaved(bench: Bench) -> Repo:
    tensors = read_tensors(bench.sound("nvfp4_ct_inputs"))
    data = tensors[f"{LAYER}.0.down_proj.weight_scale"].data
    return overwritten(bench, "prepared_ct_inputs", f"{LAYER}.w2_weight_scale", data)


@broken("QC109", level="full")
def _an_own_scale_of_another_model(bench: Bench) -> Repo:
    return overwritten(bench, "prepared_mo", f"{LAYER}.w2_weight_scale_2", f32(1e-4))
