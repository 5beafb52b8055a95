"""NVFP4 as validators read it: the decoder by hand, the bound against weights that it must take and
mistakes that it must not, and the order of prepared bytes against an oracle that goes byte by byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from broken_nvfp4 import UP, overwritten
from broken_repos import Bench
from checkpoints import convert
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4_rows import DTYPES, KINDS, Array, matrix, ours
from trtllm_layout import interleaved, shuffled

from qconvert.checkpoint.checkpoint import QuantConfig
from qconvert.core.parameter_names import Dialect
from qconvert.formats.nvfp4.encode import inverse
from qconvert.formats.nvfp4.format import (
    group_config,
    mixed_config,
    modelopt_config,
)
from qconvert.ops.fp4 import from_e4m3
from qconvert.validation.runner import Request, validate_folder
from qconvert.validators.formats.nvfp4 import fp4_floats, halfway, stated
from qconvert.validators.reading.prepared import scale_places, source_rows

DIALECTS: list[Dialect] = ["compressed-tensors", "modelopt"]
both = pytest.mark.parametrize("dialect", DIALECTS)


def test_every_code_by_hand() -> None:
    """Low half first. Sign, two bits of exponent with bias 1, one of mantissa: 1 is 0.5, 3 = 0 01 1 is
    1.5 * 2^0, 5 = 0 10 1 is 1.5 * 2, 7 = 0 11 1 is 1.5 * 4."""
    packed = np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], np.uint8)
    sizes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    found = fp4_floats(packed)
    assert found.tolist() == [*sizes, *(-size for size in sizes)]
    assert np.signbit(found[8])


# --- the bound -----------------------------------------------------------------------------------


def stored(dialect: Dialect, dtype: str, values: Array) -> tuple[Array, Array, float]:
    """What an op's bytes mean, block scales with the own one [n, K / 16], and what blocks are counted
    in."""
    (made,) = ours(dialect, dtype, values)
    rows, columns = values.shape
    packed = np.frombuffer(made.packed, np.uint8).reshape(rows, columns // 2)
    scale = np.frombuffer(made.scale, np.uint8).reshape(rows, columns // 16)
    own = np.frombuffer(made.own, np.float32)[0]
    with np.errstate(over="ignore"):
        found = inverse(packed, scale, float(own), dialect)
        blocks = from_e4m3(scale)
        factor = blocks * own if dialect == "modelopt" else blocks / own
    unit = float(own) if dialect == "modelopt" else 1 / float(own)
    return found, factor, unit


@both
@settings(max_examples=80)
@given(
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from([kind for kind in KINDS if kind != "mixed"]),
    rows=st.integers(2, 9),
    blocks=st.integers(1, 9),
    seed=st.integers(0, 10_000),
)
def test_what_is_rounded_right_is_within_the_bound(
    dialect: Dialect, dtype: str, kind: str, rows: int, blocks: int, seed: int
) -> None:
    values = matrix(kind, dtype, (rows, 16 * blocks), seed)
    found, factor, unit = stored(dialect, dtype, values)
    fits, coarse = halfway(values, found, factor, unit)
    assert fits.all()
    assert coarse == ""


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_rounded_wrong_is_not(dialect: Dialect, dtype: str) -> None:
    values = matrix("heavy", dtype, (16, 256))
    found, factor, unit = stored(dialect, dtype, values)

    def wrong(there: Array, scale: Array = factor) -> int:
        return int((~halfway(values, there, scale, unit)[0]).sum())

    step = np.repeat(factor, 16, axis=1)
    pairs = found.reshape(16, -1, 2)[:, :, ::-1].reshape(16, 256)
    assert wrong(np.ascontiguousarray(pairs)) > 2500, "the halves of bytes exchanged"
    assert wrong(-found) > 2500
    assert wrong(found * np.float32(2), factor * np.float32(2)) > 1500
    assert wrong(np.trunc(found / step) * step) > 200, "no half steps"
    moved = np.roll(factor, 1, axis=1)
    assert wrong(found / step * np.repeat(moved, 16, axis=1), moved) > 1000
    saturated = factor / np.float32(2)
    half = np.clip(
        values, -6 * np.repeat(saturated, 16, axis=1), 6 * np.repeat(saturated, 16, axis=1)
    )
    assert wrong(half, saturated) > 100, "the largest weights cut off"


def test_scales_twice_as_large_are_named() -> None:
    values = matrix("heavy", "BF16", (4, 64))
    found, factor, unit = stored("modelopt", "BF16", values)
    fits, coarse = halfway(values, values, factor * np.float32(2), unit)
    assert fits.all()
    assert coarse.startswith("row 0, block 0: its scale is ")
    assert halfway(values, found, factor, unit)[1] == ""


# --- what configs say ------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [True, False])
def test_blocks_say_whether_activations_are_quantized(inputs: bool) -> None:
    groups = {"config_groups": {"a": group_config(["Linear"], inputs=inputs)}}
    block: dict[str, Any] = {"quant_method": "compressed-tensors", **groups}
    flat = modelopt_config([], inputs=inputs)
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    packed = ["a.mlp.experts.0.up_proj"]
    mixed = mixed_config(fp8, [], packed, ["a.mlp.gate_proj"], inputs=inputs)
    hybrid = {**fp8, "quant_algo": "MIXED_PRECISION", "moe_quant_algo": flat["quant_algo"]}
    for one, name in (
        (block, "compressed-tensors"),
        (flat, "modelopt"),
        (mixed, "modelopt"),
        (hybrid, "modelopt"),
    ):
        found = stated(QuantConfig("config.json", one))
        assert found is not None
        assert (found.dialect.name, found.inputs) == (name, inputs)
    assert stated(QuantConfig("config.json", {"quant_method": "fp8"})) is None


# --- prepared --------------------------------------------------------------------------------------


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(128, 8), (384, 16), (512, 4)])
def test_the_order_is_the_oracles(gated: bool, rows: int, columns: int) -> None:
    data = np.random.default_rng(rows).integers(0, 256, (rows, columns)).astype(np.uint8)
    order = source_rows(rows, gated=gated)
    assert sorted(order) == list(range(rows))
    assert data[order].tobytes() == shuffled(data.tobytes(), rows, gated)
    laid = np.empty(data.size, np.uint8)
    laid[scale_places(rows, columns)] = data[order]
    assert laid.tobytes() == interleaved(data.tobytes(), rows, gated)


def report(folder: Path, source: Path) -> Any:
    return validate_folder(folder, str(source), request=Request("full", jobs=1))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("sound"), tmp_path_factory.mktemp("scratch"))


@pytest.mark.parametrize("name", ["prepared_mo_inputs", "prepared_ct_fp8"])
def test_the_round_trip_is_proved_or_said_not_to_be(name: str, bench: Bench) -> None:
    source = "nvfp4_mo_inputs" if "mo" in name else "nvfp4_ct_fp8_inputs"
    proved = "prepared bytes (experimental) are the NVFP4 source's, in the layout's order"
    whole = report(bench.sound(name), bench.sound(source))
    assert whole.findings == []
    assert proved in whole.proved
    part = validate_folder(bench.sound(name), None, request=Request("full", jobs=1))
    assert proved not in part.proved
    assert any("the order of prepared bytes" in text for text in part.not_checked)


def test_one_byte_of_a_prepared_folder(bench: Bench) -> None:
    """The last byte of the last expert's w2."""
    name = "model.layers.1.mlp.experts.w2_weight"
    size = 2 * 128 * 128
    repo = overwritten(bench, "prepared_mo", name, b"\x5a", size - 1)
    assert repo.against is not None
    (finding,) = report(repo.folder, repo.against).findings
    assert (finding.rule, finding.where) == ("QC109", name)
    assert "expert 1, byte " in finding.message
    assert "; 1 of 16384 bytes differ" in finding.message


def test_a_copy_of_nvfp4_is_compared_as_it_is(bench: Bench, tmp_path: Path) -> None:
    """Own scales included, which no hash tells once the receipt is gone."""
    source = bench.sound("nvfp4_ct_inputs")
    convert("copy", source, tmp_path / "out")
    found = report(tmp_path / "out", source)
    assert found.findings == []
    measured = {m.tensor: m for m in found.measures}
    assert measured[f"{UP}.weight_packed"].format == "nvfp4"
    assert measured[f"{UP}.weight_packed"].rms == 0
