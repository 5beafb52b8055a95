"""Damage to tensor data is found by its rule, whatever conversion it is done to: a table of conversions
and of what is done to each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gdn_models
import numpy as np
import pytest
from checkpoints import copied, edit_header, edit_json
from data_folders import (
    OURS,
    Array,
    Made,
    floats,
    halves,
    home,
    lines,
    maker,
    rules,
    store,
    validated,
    without,
)
from sampled import sampled

from qconvert.validation.findings import Finding, Measure
from qconvert.validation.runner import Report


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return maker(tmp_path_factory.mktemp("made"))


# --- Damage ---------------------------------------------------------------------------------------

AT = "model.language_model.layers.0"
O = f"{AT}.linear_attn.out_proj.weight"  # noqa: E741
QKVZ, BA = (f"{AT}.linear_attn.in_proj_{part}.weight" for part in ("qkvz", "ba"))
GRID = f"{QKVZ}_scale_inv"
UP = f"{AT}.mlp.experts.1.up_proj.weight"
PACKED, SCALE = f"{UP}_packed", f"{UP}_scale"
K, V, NV = gdn_models.KEYS, gdn_models.VALUES, gdn_models.NV

Damage = Callable[[Path, Path], object]  # of the source and the output
TABLE: list[tuple[str, str, Damage, set[str]]] = []  # conversion, what is done, how, what finds it


def damage(conversion: str, *found: str) -> Callable[[Damage], Damage]:
    def note(how: Damage) -> Damage:
        TABLE.append((conversion, how.__name__.strip("_"), how, set(found)))
        return how

    return note


def decoded(source: Path, name: str) -> tuple[Array, Array]:
    """FP8 codes as numbers and their scales spread over them, by arithmetic on the fields."""
    codes = lines(source, name).astype(np.int32)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, mantissa / 512, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    held = home(source, f"{name}_scale_inv")[1]
    numbers = np.frombuffer(held.data, np.uint8 if held.dtype == "U8" else np.float32)
    numbers = numbers.reshape(held.shape)
    for axis in (0, 1):
        numbers = numbers.repeat(gdn_models.BLOCK, axis)
    return np.where(codes >> 7, -size, size), numbers[: codes.shape[0], : codes.shape[1]]


@damage("dequant", "QC060")
def _two_rows_change_places(source: Path, out: Path) -> None:
    data = lines(out, O)
    store(out, O, data[[1, 0, *range(2, len(data))]])


@damage("dequant", "QC060")
def _scaled_in_bf16(source: Path, out: Path) -> None:
    values, scale = decoded(source, O)
    store(out, O, halves(floats(halves(values)) * floats(halves(scale)).reshape(values.shape)))


@damage("dequant", "QC060")
def _cut_instead_of_rounded(source: Path, out: Path) -> None:
    values, scale = decoded(source, O)
    store(out, O, halves(values.astype(np.float32) * scale))


@damage("dequant", "QC060")
def _one_bit(source: Path, out: Path) -> None:
    data = lines(out, O)
    data[5, 6] ^= 1
    store(out, O, data)


@damage("dequant", "QC060")
def _scales_of_the_row_of_blocks_below(source: Path, out: Path) -> None:
    values, scale = decoded(source, O)
    store(out, O, halves(values * np.roll(scale, gdn_models.BLOCK, 0)))


@damage("dequant", "QC060")
def _two_experts_change_places(source: Path, out: Path) -> None:
    other = UP.replace("experts.1", "experts.2")
    mine, yours = lines(out, UP), lines(out, other)
    store(out, UP, yours)
    store(out, other, mine)


@damage("dequant", "QC060", "QC066")
def _a_nan(source: Path, out: Path) -> None:
    data = lines(out, O)
    data.view("<u2")[3, 4] = 0xFFC1
    store(out, O, data)


@damage("dequant", "QC060", "QC067")
def _never_written(source: Path, out: Path) -> None:
    store(out, O, 0 * lines(out, O))


@damage("dequant", "QC060")
def _a_norm_of_another_layer(source: Path, out: Path) -> None:
    name = f"{AT}.input_layernorm.weight"
    store(out, name, lines(out, name.replace("layers.0", "layers.1")))


@damage("dequant", "QC060", "QC066")
def _an_infinity_in_a_vector(source: Path, out: Path) -> None:
    name = f"{AT}.linear_attn.A_log"
    data = lines(out, name)
    data.view(np.float32)[0, 3] = -np.inf
    store(out, name, data)


@damage("dequant", "QC061")
def _another_shape(source: Path, out: Path) -> None:
    file = home(out, O)[0]
    edit_header(file, lambda table: table[O].update(shape=table[O]["shape"][::-1]))


@damage("dequant", "QC061", "QC062")
def _a_tensor_under_another_name(source: Path, out: Path) -> None:
    for name in ("qconvert.json", "qconvert.receipt.jsonl"):
        (out / name).unlink()
    renamed = O.replace("out_proj", "output")
    edit_header(home(out, O)[0], lambda table: table.update({renamed: table.pop(O)}))
    index = out / "model.safetensors.index.json"
    if index.is_file():
        edit_json(
            index, lambda found: found["weight_map"].update({renamed: found["weight_map"].pop(O)})
        )


@damage("dequant", "QC062")
def _a_tensor_is_lost_and_nothing_says_so(source: Path, out: Path) -> None:
    for name in ("qconvert.json", "qconvert.receipt.jsonl"):
        (out / name).unlink()
    without(out, "mtp.fc.weight")


@damage("dequant exponents", "QC060")
def _exponents_multiplied_as_numbers(source: Path, out: Path) -> None:
    values, scale = decoded(source, O)
    store(out, O, halves(values * scale.astype(np.float32)))


def reordered(data: Array, sizes: tuple[int, ...], groups: int) -> Array:
    """Segments one after the other to groups, by slices of each."""
    ends = np.cumsum(sizes)
    parts = [data[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    cut = [np.split(part, groups) for part in parts]
    return np.concatenate([piece[group] for group in range(groups) for piece in cut])


ROWS, VECTORS = (K, K, V, V), (NV, NV)


@damage("fuse bf16", "QC060", "QC063")
def _interleaved_and_called_contiguous(source: Path, out: Path) -> None:
    store(out, QKVZ, reordered(lines(out, QKVZ), ROWS, gdn_models.NK))


@damage("fuse bf16", "QC060", "QC063")
def _ba_interleaved_and_called_contiguous(source: Path, out: Path) -> None:
    store(out, BA, reordered(lines(out, BA), VECTORS, gdn_models.NK))


@damage("fuse bf16", "QC060", "QC063")
def _ranks_after_one_another(source: Path, out: Path) -> None:
    store(out, QKVZ, reordered(lines(out, QKVZ), ROWS, 2))


@damage("fuse bf16", "QC060", "QC063")
def _a_before_b(source: Path, out: Path) -> None:
    store(out, BA, np.roll(lines(out, BA), NV, 0))


@damage("fuse bf16", "QC060", "QC064")
def _rows_of_heads_shuffled(source: Path, out: Path) -> None:
    store(out, QKVZ, lines(out, QKVZ)[np.random.default_rng(1).permutation(sum(ROWS))])


@damage("fuse bf16", "QC060", "QC063")
def _the_manifest_says_interleaved(source: Path, out: Path) -> None:
    edit_json(out / "qconvert.json", lambda manifest: manifest.update(gdn_groups=gdn_models.NK))


@damage("as qwen3-next", "QC060", "QC063")
def _contiguous_for_qwen3_next(source: Path, out: Path) -> None:
    at = "model.layers.1.linear_attn."
    parts = [
        lines(source, f"model.language_model.layers.1.linear_attn.in_proj_{p}.weight") for p in "ba"
    ]
    store(out, f"{at}in_proj_ba.weight", np.concatenate(parts))


@damage("fuse", "QC060", "QC065")
def _scales_left_where_they_were(source: Path, out: Path) -> None:
    sizes = tuple(size // gdn_models.BLOCK for size in ROWS)
    store(out, GRID, reordered(lines(out, GRID), sizes, gdn_models.NK))


@damage("fuse", "QC060", "QC063")
def _rows_moved_and_not_their_scales(source: Path, out: Path) -> None:
    store(out, QKVZ, reordered(lines(out, QKVZ), ROWS, gdn_models.NK))


@damage("fuse", "QC060", "QC065")
def _scales_in_no_order(source: Path, out: Path) -> None:
    data = lines(out, GRID)
    store(out, GRID, data[np.random.default_rng(2).permutation(len(data))])


@damage("unfuse bf16", "QC060", "QC063")
def _b_and_a_cut_at_the_middle(source: Path, out: Path) -> None:
    at = "model.layers.0.linear_attn.in_proj_"
    data = lines(source, f"{at}ba.weight")
    store(out, f"{at}b.weight", data[:NV])
    store(out, f"{at}a.weight", data[NV:])


@damage("fuse from interleaved", "QC060", "QC063")
def _taken_for_contiguous_and_fused_in_ranks(source: Path, out: Path) -> None:
    name = "model.layers.2.linear_attn.in_proj_ba.weight"
    store(out, name, reordered(lines(source, name), VECTORS, 2))


@damage("stack", "QC060")
def _gate_and_up_change_places(source: Path, out: Path) -> None:
    name = f"{AT}.mlp.experts.gate_up_proj"
    data = lines(out, name)
    rows = 2 * gdn_models.INTERMEDIATE
    data[rows : 2 * rows] = np.roll(data[rows : 2 * rows], rows // 2, 0)
    store(out, name, data)


@damage("stack", "QC060", "QC067")
def _one_expert_of_a_stack_is_zero(source: Path, out: Path) -> None:
    name = f"{AT}.mlp.experts.down_proj"
    data = lines(out, name)
    data[gdn_models.HIDDEN : 2 * gdn_models.HIDDEN] = 0
    store(out, name, data)


@damage("stack fp8", "QC060")
def _scales_of_two_experts_change_places(source: Path, out: Path) -> None:
    name = f"{AT}.mlp.experts.gate_up_proj_scale_inv"
    data = lines(out, name)
    store(out, name, np.roll(data, len(data) // gdn_models.EXPERTS, 0))


@damage("copy", "QC060", "QC066")
def _a_nan_among_codes(source: Path, out: Path) -> None:
    data = lines(out, O)
    data[2, 3] = 0xFF
    store(out, O, data)


@damage("copy", "QC060", "QC068")
def _exponents_stored_as_numbers(source: Path, out: Path) -> None:
    name = f"{O}_scale_inv"
    data = lines(out, name)
    data.view(np.float32)[:] = np.arange(data.size // 4).reshape(data.shape[0], -1) + 300
    store(out, name, data)


@damage("copy", "QC060", "QC068")
def _a_negative_scale(source: Path, out: Path) -> None:
    name = f"{O}_scale_inv"
    data = lines(out, name)
    data[1, 7] ^= 0x80
    store(out, name, data)


@damage("copy", "QC060", "QC068")
def _a_zero_scale(source: Path, out: Path) -> None:
    name = f"{O}_scale_inv"
    data = lines(out, name)
    data[1, 4:8] = 0
    store(out, name, data)


@damage("w4a16", "QC060")
def _a_code_one_too_many(source: Path, out: Path) -> None:
    data = lines(out, PACKED)
    data[4, 3] ^= 0x10
    store(out, PACKED, data)


@damage("w4a16", "QC060")
def _words_with_the_first_code_highest(source: Path, out: Path) -> None:
    data = lines(out, PACKED)
    store(out, PACKED, data >> 4 | data << 4)


@damage("w4a16", "QC060", "QC067")
def _every_code_zero(source: Path, out: Path) -> None:
    store(out, PACKED, 0 * lines(out, PACKED) + np.uint8(0x88))


@damage("w4a16", "QC060")
def _scales_twice_as_large(source: Path, out: Path) -> None:
    store(out, SCALE, halves(2 * floats(lines(out, SCALE))))


@damage("w4a16", "QC060", "QC068")
def _scales_of_nan(source: Path, out: Path) -> None:
    store(out, SCALE, lines(out, SCALE) | np.uint8(0x7F))


@damage("w4a16 of fp8", "QC060", "QC068")
def _infinite_scales(source: Path, out: Path) -> None:
    data = lines(out, SCALE)
    data.view("<u2")[2, 1] = 0x7F80
    store(out, SCALE, data)


@damage("w4a16 of fp8", "QC060")
def _groups_change_places(source: Path, out: Path) -> None:
    store(out, SCALE, np.roll(lines(out, SCALE), 2, 1))


@pytest.mark.parametrize("case", sampled(TABLE, name=lambda case: f"{case[0]}: {case[1]}"))
def test_damage(case: tuple[str, str, Damage, set[str]], made: Made, tmp_path: Path) -> None:
    conversion, _, how, found = case
    source, sound = made(conversion)
    out = copied(sound, tmp_path / "out")
    how(source, out)
    report = validated(out, source)
    assert rules(report) == found
    for finding in report.findings:
        if finding.rule in ("QC060", "QC066", "QC068"):
            assert "row" in finding.message or "byte" in finding.message or "[" in finding.message


def test_every_rule_has_its_damage() -> None:
    assert {rule for _, _, _, found in TABLE for rule in found} | {"QC069"} == set(OURS)


def one(report: Report, rule: str) -> Finding:
    (finding,) = [finding for finding in report.findings if finding.rule == rule]
    return finding


def test_the_first_misfit_is_named(made: Made, tmp_path: Path) -> None:
    source, sound = made("dequant")
    out = copied(sound, tmp_path / "out")
    data = lines(out, O)
    was, data.view("<u2")[7, 9] = floats(data)[7, 9], 0x4248
    store(out, O, data)
    finding = one(validated(out, source), "QC060")
    assert (finding.severity, finding.where) == ("error", O)
    assert finding.message == (
        f"row 7, column 9: expected {was:.9g} as in the source, found 50; 1 of {data.size // 2} "
        "weights looked at there are wrong (fp8 of the source as bf16, rounded once)"
    )
    (measure,) = [m for m in validated(out, source).measures if m.tensor == O]
    assert measure.worst == pytest.approx(abs(50 - was))
    assert measure.rms > 1


def test_the_order_found_is_named(made: Made, tmp_path: Path) -> None:
    source, sound = made("fuse bf16")
    out = copied(sound, tmp_path / "out")
    _interleaved_and_called_contiguous(source, out)
    finding = one(validated(out, source), "QC063")
    assert finding.where == QKVZ
    assert finding.message == (
        "q|k|v|z: the bytes are interleaved, G=4; qconvert.json says contiguous, G=1 (row 8 is the "
        "first to differ)"
    )


def measures(found: list[Measure], tensor: str) -> list[Measure]:
    return [measure for measure in found if measure.tensor == tensor]


def test_heads_or_tails_of_w4a16(made: Made) -> None:
    """The measure against numpy's own arithmetic on what is stored."""
    source, out = made("w4a16")
    (measure,) = measures(validated(out, source).measures, PACKED)
    words = lines(out, PACKED).view("<u4")
    codes = (words[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).astype(np.float64) - 8
    scale = floats(lines(out, SCALE)).astype(np.float64).repeat(16, 1)
    found = codes.reshape(scale.shape) * scale
    wanted = floats(lines(source, UP)).astype(np.float64)
    off = found - wanted
    assert measure.rms == pytest.approx(np.sqrt((off**2).sum() / (wanted**2).sum()), rel=1e-5)
    assert measure.worst == pytest.approx(np.abs(off).max(), rel=1e-5)
    cosine = (found * wanted).sum() / np.sqrt((found**2).sum() * (wanted**2).sum())
    assert measure.cosine == pytest.approx(cosine, rel=1e-6)
    assert json.dumps(measure.weights) == str(wanted.size)
