"""Packed integers as validators read them: against a reader that goes word by word, and how far from
the source they may be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from checkpoints import Model, Tensor, bf16_moe, copied, read_tensors, run_cli
from data_folders import floats, halves, home, read_matrix, store, validated
from hypothesis import given, settings
from hypothesis import strategies as st
from int_forms import from_compressed_tensors, from_gptq, packed

from qconvert.validation.findings import Measure

Array = np.ndarray[Any, Any]
M = "model.layers.0.self_attn.q_proj"
UP = "model.layers.1.mlp.experts.1.up_proj"


def words(fields: Array, bits: int) -> Tensor:
    found = packed(fields, bits).astype("<i4")
    return Tensor("I32", found.shape, found.tobytes())


def numbers(dtype: str, values: Array) -> tuple[Tensor, Array]:
    """Scales of a dtype, and what they are as float32."""
    if dtype == "F16":
        half = values.astype("<f2")
        return Tensor("F16", half.shape, half.tobytes()), half.astype(np.float32)
    if dtype == "BF16":
        cut = halves(values)
        return Tensor("BF16", values.shape, cut.tobytes()), floats(cut).reshape(values.shape)
    single = values.astype("<f4")
    return Tensor("F32", single.shape, single.tobytes()), single


def weights(bits: int, group: int | None, symmetric: bool, order: str | None) -> dict[str, Any]:
    return {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "actorder": order,
        "strategy": "channel" if group is None else "group", "group_size": group,
    }  # fmt: skip


def block(**stated: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": stated}}}


def model(tensors: Mapping[str, Tensor], quantization: Mapping[str, Any], folder: Path) -> Path:
    config = {"model_type": "toy", "quantization_config": quantization}
    named = {f"{M}.{part}": tensor for part, tensor in tensors.items()}
    return Model(config, named).write(folder, 1)


# --- Decoding -------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([None, 8, 16]),
    symmetric=st.booleans(),
    ordered=st.booleans(),
    dtype=st.sampled_from(["BF16", "F16", "F32"]),
    rows=st.integers(1, 21),
    seed=st.integers(0, 999),
)
def test_compressed_tensors_in_any_form(
    tmp_path_factory: pytest.TempPathFactory,
    bits: int,
    group: int | None,
    symmetric: bool,
    ordered: bool,
    dtype: str,
    rows: int,
    seed: int,
) -> None:
    """Rows that are no whole words of zero points too."""
    columns, ordered = 32, ordered and group is not None
    random = np.random.default_rng(seed)
    groups = columns // (group or columns)
    codes = random.integers(0, 1 << bits, (rows, columns))
    scale, exact = numbers(dtype, random.standard_normal((rows, groups)).astype(np.float32))
    tensors = {"weight_packed": words(codes, bits), "weight_scale": scale}
    parts = {"weight_packed": packed(codes, bits), "weight_scale": exact}
    if not symmetric:
        zeros = random.integers(0, 1 << bits, (groups, rows))
        turned = packed(zeros, bits).T
        raw = np.ascontiguousarray(turned.astype("<i4"))
        tensors["weight_zero_point"] = Tensor("I32", raw.shape, raw.tobytes())
        parts["weight_zero_point"] = turned
    if ordered:
        order = random.permutation(np.repeat(np.arange(groups), columns // groups))
        tensors["weight_g_idx"] = Tensor("I32", (columns,), order.astype("<i4").tobytes())
        parts["weight_g_idx"] = order
    stated = weights(bits, group, symmetric, "group" if ordered else None)
    folder = model(tensors, block(**stated), tmp_path_factory.mktemp("ct"))
    wanted = from_compressed_tensors(parts, bits, columns)
    assert np.array_equal(read_matrix(folder, f"{M}.weight_packed"), wanted)


@settings(max_examples=60)
@given(
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([None, 8, 16]),
    version=st.sampled_from([1, 2]),
    ordered=st.booleans(),
    seed=st.integers(0, 999),
)
def test_gptq_in_any_form(
    tmp_path_factory: pytest.TempPathFactory,
    bits: int,
    group: int | None,
    version: Literal[1, 2],
    ordered: bool,
    seed: int,
) -> None:
    rows, columns = 16, 32
    random = np.random.default_rng(seed)
    groups = columns // (group or columns)
    codes = random.integers(0, 1 << bits, (rows, columns))
    zeros = random.integers(0, (1 << bits) - 1, (groups, rows))  # less the one readers differ on
    scale, exact = numbers("F16", random.standard_normal((groups, rows)).astype(np.float32))
    order = np.repeat(np.arange(groups), columns // groups)
    if ordered:
        order = random.permutation(order)
    parts: dict[str, Array] = {
        "qweight": packed(codes, bits).T, "qzeros": packed(zeros, bits), "scales": exact,
        "g_idx": order,
    }  # fmt: skip
    tensors = {
        part: Tensor("I32", parts[part].shape, np.ascontiguousarray(parts[part], "<i4").tobytes())
        for part in ("qweight", "qzeros", "g_idx")
    }
    quantization = {
        "quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": ordered,
        "sym": False, "checkpoint_format": {1: "gptq", 2: "gptq_v2"}[version],
    }  # fmt: skip
    folder = model(tensors | {"scales": scale}, quantization, tmp_path_factory.mktemp("gptq"))
    assert np.array_equal(read_matrix(folder, f"{M}.qweight"), from_gptq(parts, bits, version))


def test_gptq_by_hand(tmp_path: Path) -> None:
    """One row of eight codes 0 to 7 (word 0x76543210) among eight; its zero point is stored as 2, which
    the first version means as 3; its scale is 0.5."""
    tensors = {
        "qweight": Tensor(
            "I32", (1, 8), np.array([0x76543210] + 7 * [0x88888888], "<u4").tobytes()
        ),
        "qzeros": Tensor("I32", (1, 1), np.array([0x77777772], "<u4").tobytes()),
        "scales": numbers("F16", np.full((1, 8), 0.5))[0],
        "g_idx": Tensor("I32", (8,), bytes(32)),
    }
    stated = {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False, "sym": False}
    found = read_matrix(model(tensors, stated, tmp_path), f"{M}.qweight")
    assert found.tolist() == [[-1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2]] + 7 * [8 * [0.0]]


def test_columns_of_no_group_are_no_numbers(tmp_path: Path) -> None:
    codes, scale = np.full((2, 16), 9), numbers("F32", np.ones((2, 2)))[0]
    order = Tensor("I32", (16,), np.array(7 * [0] + [2] + 7 * [1] + [-1], "<i4").tobytes())
    tensors = {"weight_packed": words(codes, 4), "weight_scale": scale, "weight_g_idx": order}
    found = read_matrix(
        model(tensors, block(**weights(4, 8, True, "group")), tmp_path), f"{M}.weight_packed"
    )
    assert np.isnan(found).tolist() == 2 * [7 * [False] + [True] + 7 * [False] + [True]]


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        (weights(4, 8, False, None), "has no weight_zero_point"),
        (weights(4, 8, True, "group"), "has no weight_g_idx"),
        (weights(4, 3, True, None), "states groups of 3"),
        (weights(9, 8, True, None), "states no form"),
    ],
)
def test_what_cannot_be_read_is_said(stated: dict[str, Any], says: str, tmp_path: Path) -> None:
    scale = numbers("F32", np.ones((2, 2)))[0]
    tensors = {"weight_packed": words(np.full((2, 16), 9), 4), "weight_scale": scale}
    folder = model(tensors, block(**stated), tmp_path / "a")
    plain = {"weight": Tensor("BF16", (2, 16), bytes(64))}
    source = Model({"model_type": "toy"}, {f"{M}.weight": plain["weight"]}).write(tmp_path / "b", 1)
    said = [text for text in validated(folder, source).not_checked if "not compared" in text]
    assert len(said) == 1
    assert says in said[0]


# --- Against the source ---------------------------------------------------------------------------

FORMS = {
    "int4 row": ("--group-size", "channel"),
    "int4 asymmetric": ("--group-size", "32", "--asymmetric"),
    "int8": ("--bits", "8", "--group-size", "32"),
    "int8 asymmetric": ("--bits", "8", "--group-size", "channel", "--asymmetric"),
    "gptq": ("--group-size", "32", "--packing", "gptq"),
    "gptq-v2 asymmetric": ("--group-size", "64", "--packing", "gptq-v2", "--asymmetric"),
    "gptq int8": ("--bits", "8", "--group-size", "channel", "--packing", "gptq"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heavy tails, an outlier channel, a group of zeros, and groups on one side of 0."""
    made = bf16_moe(hidden_size=128, moe_intermediate_size=64)
    random = np.random.default_rng(1)
    for name, value in made.tensors.items():
        if ".experts." not in name:
            shape = tuple(128 if n == 8 and "norm" not in name else n for n in value.shape)
            if "layernorm" in name or name == "model.norm.weight":
                shape = (128,)
            made.tensors[name] = Tensor(
                "BF16", shape, halves(random.standard_normal(shape)).tobytes()
            )
            continue
        shape = (128, 64) if "down_proj" in name else (64, 128)
        values = 0.02 * random.standard_t(3, shape)
        values[:, 5] *= 20
        values[3, :32] = 0
        values[4, 32:64] = np.abs(values[4, 32:64]) + 0.01
        values[5, 32:64] = -np.abs(values[5, 32:64]) - 0.01
        made.tensors[name] = Tensor("BF16", shape, halves(values).tobytes())
    return made.write(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def outputs(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    found = {}
    for name, options in FORMS.items():
        found[name] = tmp_path_factory.mktemp("out") / "folder"
        made = run_cli("w4a16", source, found[name], "--rtn", *options, "--jobs", "1")
        assert made.code == 0, made.err
    return found


@pytest.mark.parametrize("form", FORMS)
def test_what_is_rounded_fits_and_is_measured(
    form: str, outputs: Mapping[str, Path], source: Path
) -> None:
    report = validated(outputs[form], source)
    assert [f for f in report.findings if f.rule in ("QC060", "QC061", "QC066", "QC068")] == []
    assert not [text for text in report.not_checked if "not compared" in text]
    expected = "w8a16" if "int8" in form else "w4a16"
    found = [m for m in report.measures if isinstance(m, Measure) and m.expert is not None]
    assert len(found) == 12
    assert {m.format for m in found} == {expected}
    assert all(0 < m.rms < (0.05 if "int8" in form else 0.5) for m in found)


def word_of(folder: Path) -> tuple[str, int]:
    """A tensor of packed codes, and how many bytes it has."""
    names = (f"{UP}.weight_packed", f"{UP}.qweight")
    name = next(n for n in names if n in read_tensors(folder))
    return name, len(home(folder, name)[1].data)


@pytest.mark.parametrize("form", FORMS)
def test_a_code_some_steps_off_is_found(
    form: str, outputs: Mapping[str, Path], source: Path, tmp_path: Path
) -> None:
    out = copied(outputs[form], tmp_path / "broken")
    name, size = word_of(out)
    data = np.frombuffer(home(out, name)[1].data, np.uint8).copy()
    at = size // 2 + 3
    steps = 16 if "int8" in form else 4  # of the high nibble: 16 times as much of a byte
    add = steps if "int8" in form else steps << 4
    data[at] = data[at] + add if int(data[at]) + add < 256 else data[at] - add
    store(out, name, data)
    found = [f for f in validated(out, source).findings if f.rule == "QC060"]
    assert [f.where for f in found] == [name]
    assert "1 of " in found[0].message


@pytest.mark.parametrize("form", FORMS)
def test_another_experts_codes_are_found(
    form: str, outputs: Mapping[str, Path], source: Path, tmp_path: Path
) -> None:
    out = copied(outputs[form], tmp_path / "broken")
    held = read_tensors(out)
    for name, tensor in held.items():
        if name.startswith(f"{UP}.") and not name.endswith(("g_idx", "_shape")):
            other = name.replace("experts.1", "experts.0")
            store(out, name, np.frombuffer(held[other].data, np.uint8))
            store(out, other, np.frombuffer(tensor.data, np.uint8))
    found = {
        f.where.rpartition(".")[0] for f in validated(out, source).findings if f.rule == "QC060"
    }
    assert found == {UP, UP.replace("experts.1", "experts.0")}


@pytest.mark.parametrize("form", [form for form in FORMS if "asymmetric" not in form])
def test_a_matrix_of_zeros_is_noticed(
    form: str, outputs: Mapping[str, Path], tmp_path: Path
) -> None:
    out = copied(outputs[form], tmp_path / "zero")
    name, size = word_of(out)
    store(out, name, np.full(size, 0x80 if "int8" in form else 0x88, np.uint8))
    assert [f.where for f in validated(out, None).findings if f.rule == "QC067"] == [name]


@pytest.mark.parametrize("form", FORMS)
def test_a_scale_of_zero_beside_codes(
    form: str, outputs: Mapping[str, Path], tmp_path: Path
) -> None:
    """Turned scales are counted by columns: the message has to say which row it is."""
    out = copied(outputs[form], tmp_path / "zero")
    name = f"{UP}.scales" if "gptq" in form else f"{UP}.weight_scale"
    data = np.frombuffer(home(out, name)[1].data, "<u2").copy()
    shape = home(out, name)[1].shape
    rows = data.reshape(shape).T if "gptq" in form else data.reshape(shape)
    rows[7, 0] = 0
    store(out, name, data.view(np.uint8))
    (found,) = [f for f in validated(out, None).findings if f.rule == "QC068"]
    assert (found.where, "scale [7, 0]" in found.message) == (name, True)
