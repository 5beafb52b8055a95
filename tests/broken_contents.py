"""Broken repos that only their contents give away: see tests/broken_repos.py. Wrong orders, scales and
rounding have the right shapes, load everywhere and babble."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gdn_models
import numpy as np
from broken_repos import (
    GDN,
    HEAD,
    MANIFEST,
    RECEIPT,
    Bench,
    Repo,
    broken,
    change,
    edit_config,
    edit_manifest,
    home,
    overwrite,
)
from checkpoints import (
    Tensor,
    bf16_moe,
    convert,
    fp8_moe,
    fp8_weight,
    read_tensors,
    tensor,
    unjudged,
)

Array = np.ndarray[Any, Any]
NK, NV = gdn_models.NK, gdn_models.NV
EXPERT = "model.layers.1.mlp.experts.1.up_proj"
CPU = "blk.1.ffn_up_exps.1.numa.0"
Q = "model.language_model.layers.3.self_attn.q_proj"


def unsigned(folder: Path) -> Path:
    """As another tool would have left it: without our receipt and manifest."""
    for name in (RECEIPT, MANIFEST):
        (folder / name).unlink()
    return folder


def unhashed(folder: Path) -> Path:
    """Without the receipt, whose hashes (QC022) see every change of a byte."""
    (folder / RECEIPT).unlink()
    return folder


def numbers(value: Tensor) -> Array:
    """Bytes of a bf16 or F32 tensor as float32, one row each."""
    raw = np.frombuffer(value.data, "<u2" if value.dtype == "BF16" else "<f4")
    if value.dtype == "BF16":
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.reshape(value.shape)


def permuted(value: Tensor, rows: Array) -> Tensor:
    data = np.frombuffer(value.data, np.uint8).reshape(value.shape[0], -1)[rows]
    return Tensor(value.dtype, value.shape, data.tobytes())


def grouped(segments: tuple[int, ...], groups: int) -> Array:
    """Rows of segments one after the other, in the order of `groups` groups."""
    starts = np.cumsum((0, *segments[:-1]))
    found = [
        start + group * (size // groups) + np.arange(size // groups)
        for group in range(groups)
        for start, size in zip(starts, segments, strict=True)
    ]
    return np.concatenate(found)


QKVZ = (gdn_models.KEYS, gdn_models.KEYS, gdn_models.VALUES, gdn_models.VALUES)


# --- Bytes ---------------------------------------------------------------------------------------


@broken("QC022", level="full")
def _a_bit_flipped_on_the_way(bench: Bench) -> Repo:
    folder = bench.copy("moe_dequantized")
    first = read_tensors(folder)[HEAD].data[0]
    return Repo(overwrite(folder, HEAD, bytes([first ^ 1])))


@broken("QC025", "mergekit#390", severity="warning", level="sample")
def _the_tied_head_is_stored_twice(bench: Bench) -> Repo:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors[HEAD] = tensors["model.embed_tokens.weight"]

    return Repo(change(bench.copy("qwen35_text_tied"), add))


@broken("QC025", "llm-compressor#2798", level="sample")
def _a_tied_head_with_other_weights(bench: Bench) -> Repo:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors[HEAD] = permuted(tensors["model.embed_tokens.weight"], np.arange(24)[::-1])

    return Repo(change(bench.copy("qwen35_text_tied"), add))


@broken("QC033", level="full", beside=["QC060"])
def _the_source_changed_since(bench: Bench) -> Repo:
    """Where no sample of it fell by which sources are told apart; its weights differ from ours, too."""
    source = bench.copy("experts")
    out = bench.scratch / "out"
    convert("copy", source, out)
    file = home(source, f"{EXPERT}.weight")
    size = file.stat().st_size
    raw = bytearray(file.read_bytes())
    raw[(size // 16) * 15 + 8192] ^= 1
    file.write_bytes(raw)
    return Repo(out, source)


# --- Weights -------------------------------------------------------------------------------------


@broken("QC041", level="sample")
def _a_code_that_the_kernels_do_not_have(bench: Bench) -> Repo:
    return Repo(overwrite(unhashed(bench.copy("cpu")), f"{CPU}.weight", b"\x80", 77))


@broken("QC042", level="full")
def _experts_that_changed_places(bench: Bench) -> Repo:
    folder = unhashed(bench.copy("cpu"))
    held = read_tensors(folder)
    for part in ("weight", "scale"):
        one, other = f"{CPU}.{part}", f"{CPU.replace('exps.1', 'exps.0')}.{part}"
        overwrite(folder, one, held[other].data)
        overwrite(folder, other, held[one].data)
    return Repo(folder, bench.sound("experts"))


@broken("QC060", "transformers#46763", level="full")
def _scales_rounded_after_quantizing(bench: Bench) -> Repo:
    """Codes made with one scale, stored under that scale rounded up to a power of two."""
    folder = unsigned(bench.copy("dequantized_ue8m0"))
    name = f"{Q}.weight"
    value = read_tensors(folder)[name]
    doubled = gdn_models.bf16(numbers(value) * 2)
    return Repo(overwrite(folder, name, doubled.data), bench.sound("qwen35_ue8m0"))


@broken("QC060", "transformers#36026", level="full")
def _blocks_inferred_from_ragged_shapes(bench: Bench) -> Repo:
    """18 rows under 5 rows of scales in blocks of 4, dequantized in blocks of 18 // 5 = 3."""
    model = fp8_moe()
    name = "model.layers.0.self_attn.q_proj"
    model.tensors |= fp8_weight(name, 18, 8)
    source = model.write(bench.scratch / "source")
    out = bench.scratch / "out"
    convert("dequant", source, out)
    right = numbers(read_tensors(out)[f"{name}.weight"])
    scales = numbers(model.tensors[f"{name}.weight_scale_inv"])
    rows = np.arange(18)
    codes = right / np.repeat(scales[rows // 4], 4, axis=1)
    wrong = codes * np.repeat(scales[np.minimum(rows // 3, 4)], 4, axis=1)
    return Repo(overwrite(unsigned(out), f"{name}.weight", gdn_models.bf16(wrong).data), source)


@broken("QC060", "omlx#2159", level="full")
def _exponents_multiplied_as_numbers(bench: Bench) -> Repo:
    """A factor of 115 for 2^(115 - 127)."""
    folder = unsigned(bench.copy("dequantized_ue8m0"))
    name = f"{Q}.weight"
    grid = read_tensors(bench.sound("qwen35_ue8m0"))[f"{name}_scale_inv"]
    exponents = np.frombuffer(grid.data, np.uint8).reshape(grid.shape).astype(np.float32)
    factors = np.kron(exponents / 2.0 ** (exponents - 127), np.ones((8, 8), np.float32))
    wrong = gdn_models.bf16(numbers(read_tensors(folder)[name]) * factors)
    return Repo(overwrite(folder, name, wrong.data), bench.sound("qwen35_ue8m0"))


@broken("QC061", level="sample")
def _a_matrix_the_source_does_not_have(bench: Bench) -> Repo:
    more = {"model.language_model.adapter.weight": tensor("BF16", 4, 4)}
    folder = change(bench.copy("qwen35"), lambda tensors: tensors.update(more))
    return Repo(folder, bench.sound("qwen35"))


@broken("QC062", "Model-Optimizer#733", level="sample", beside=["QC023"])
def _a_draft_layer_was_left_out(bench: Bench) -> Repo:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("mtp.")]:
            del tensors[name]

    return Repo(change(bench.copy("qwen35"), drop), bench.sound("qwen35"))


@broken("QC062", level="sample", beside=["QC083"])
def _a_head_left_out_under_a_flag_that_ties_it(bench: Bench) -> Repo:
    """The config was edited with the weights, and agrees with them."""
    folder = change(bench.copy("moe_bf16"), lambda tensors: tensors.pop(HEAD))
    edit_config(folder, lambda config: config.update(tie_word_embeddings=True))
    return Repo(folder, bench.sound("moe_bf16"))


# --- Linear attention ----------------------------------------------------------------------------


@broken("QC063", level="sample", beside=["QC060"])
def _interleaved_where_contiguous_is_said(bench: Bench) -> Repo:
    out = bench.scratch / "out"
    unjudged(f"passes:\n- fuse: {{groups: {NK}}}\n", bench.sound("qwen35"), out)
    edit_manifest(unhashed(out), lambda manifest: manifest.update(gdn_groups=1))
    return Repo(out, bench.sound("qwen35"))


@broken("QC063", "vllm#36242", level="sample", beside=["QC060"])
def _b_and_a_cut_at_the_midpoint(bench: Bench) -> Repo:
    """Of an interleaved tensor each half holds some heads' b and a: GSM8K falls to 0.5 %."""
    source = bench.sound("qwen3_next")
    folder = unhashed(bench.copy("as_qwen35"))
    fused = read_tensors(source)
    at = "model.layers.0.linear_attn"
    ba = fused[f"{at}.in_proj_ba.weight"].data
    half = len(ba) // 2
    overwrite(folder, f"{at}.in_proj_b.weight", ba[:half])
    overwrite(folder, f"{at}.in_proj_a.weight", ba[half:])
    return Repo(folder, source)


@broken("QC064", level="sample", beside=["QC060"])
def _rows_in_no_known_order(bench: Bench) -> Repo:
    folder = unhashed(bench.copy("dequantized_and_fused"))
    name = f"{GDN}.in_proj_ba.weight"
    value = read_tensors(folder)[name]
    shuffled = np.random.default_rng(1).permutation(2 * NV)
    overwrite(folder, name, permuted(value, shuffled).data)
    return Repo(folder, bench.sound("qwen35_fp8"))


@broken("QC065", "sglang#35703", level="sample", beside=["QC060"])
def _rows_moved_and_their_scales_stayed(bench: Bench) -> Repo:
    """Rows interleaved for Qwen3-Next, scales as they were: contiguous."""
    folder = unhashed(bench.copy("as_qwen3_next"))
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight_scale_inv"
    value = read_tensors(folder)[name]
    blocks = tuple(rows // gdn_models.BLOCK for rows in QKVZ)
    back = np.argsort(grouped(blocks, NK))
    overwrite(folder, name, permuted(value, back).data)
    return Repo(folder, bench.sound("qwen35_fp8"))


# --- Numbers -------------------------------------------------------------------------------------


@broken("QC066", level="sample")
def _a_tensor_with_a_nan(bench: Bench) -> Repo:
    return Repo(overwrite(bench.copy("moe_bf16"), f"{EXPERT}.weight", b"\xc0\x7f", 6))


@broken("QC067", severity="warning", level="sample")
def _a_tensor_that_was_reserved_and_never_written(bench: Bench) -> Repo:
    folder = bench.copy("moe_bf16")
    size = len(read_tensors(folder)[f"{EXPERT}.weight"].data)
    return Repo(overwrite(folder, f"{EXPERT}.weight", bytes(size)))


@broken("QC068", level="sample")
def _a_scale_that_is_nan(bench: Bench) -> Repo:
    """Of a block of zeros, 0 / 0."""
    nan = struct.pack("<f", float("nan"))
    return Repo(overwrite(bench.copy("moe_fp8"), f"{EXPERT}.weight_scale_inv", nan))


@broken("QC069", "vllm#54974", level="sample")
def _gate_and_up_under_two_global_scales(bench: Bench) -> Repo:
    """NVFP4: what is fused at load is read under the larger one."""
    model = bf16_moe()
    model.config["hidden_size"], model.config["moe_intermediate_size"] = 16, 16
    model.config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "tensor_group",
                    "group_size": 16,
                },
            }
        },
        "ignore": ["lm_head", "re:.*self_attn.*"],
    }
    tensors: dict[str, Tensor] = {}
    for name, value in model.tensors.items():
        if ".experts." not in name:
            shape = tuple(16 if size == 8 else size for size in value.shape)
            tensors[name] = gdn_models.bf16(gdn_models.numbers(name, *shape))
            continue
        module = name.removesuffix(".weight")
        scale = 2.0 if "up_proj" in module else 1.0
        tensors[f"{module}.weight_packed"] = tensor("U8", 16, 8)
        tensors[f"{module}.weight_scale"] = Tensor("F8_E4M3", (16, 1), bytes([0x38] * 16))
        tensors[f"{module}.weight_global_scale"] = Tensor("F32", (1,), struct.pack("<f", scale))
    model.tensors = tensors
    return bench.write(model)
