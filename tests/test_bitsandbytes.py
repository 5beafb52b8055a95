"""bitsandbytes' checkpoints are read, judged and converted. Oracle: the format's text by hand
(bitsandbytes_models.py), and, where bitsandbytes is installed, its own decoder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bitsandbytes_models import SCHEMES, Scheme, bnb_model, encode, tensor
from checkpoints import Model, Tensor, read_tensors, run_cli
from dequantized import bf16, converted, refused, rules
from ops_harness import buffer, run_op

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError
from qconvert.core.graph import Source
from qconvert.formats.bitsandbytes.format import DequantBnb4, DequantBnb8, Nested

every = pytest.mark.parametrize("scheme", SCHEMES, ids=str)
LINEAR = "model.layers.1.self_attn.q_proj"
STATE = f"{LINEAR}.weight.quant_state.bitsandbytes__nf4"
NF4 = Scheme("nf4", 64, nested=True)


@every
def test_a_model_becomes_bf16(scheme: Scheme, tmp_path: Path) -> None:
    model, meaning = bnb_model(scheme)
    modules = {name.removesuffix(".weight") for name in meaning}
    kept = {
        n: t for n, t in model.tensors.items() if not any(n.startswith(f"{m}.") for m in modules)
    }
    assert not rules(model, tmp_path / "judged")
    assert converted(model, tmp_path) == kept | {n: bf16(v) for n, v in meaning.items()}
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_bytes())


@pytest.mark.parametrize("command", [("int8",), ("fp8", "--channel")])
@pytest.mark.parametrize("scheme", [NF4, Scheme("int8")], ids=str)
def test_it_is_quantized_in_one_read(
    scheme: Scheme, command: tuple[str, ...], tmp_path: Path
) -> None:
    model, _ = bnb_model(scheme)
    source, out = model.write(tmp_path / "source"), tmp_path / "out"
    done = run_cli(command[0], source, out, *command[1:], "--jobs", "1")
    assert done.code == 0, done.err
    judged = run_cli("validate", out, "--level", "full", "--against", source)
    assert judged.code == 0, judged.out
    assert not any(".weight." in name for name in read_tensors(out))


def test_a_copy_stays_as_it_is(tmp_path: Path) -> None:
    model, _ = bnb_model(NF4)
    source, out = model.write(tmp_path / "source"), tmp_path / "out"
    done = run_cli("run", "copy", source, out, "--jobs", "1")
    assert done.code == 0, done.err
    assert read_tensors(out) == read_tensors(source)


def test_inspect_names_it(tmp_path: Path) -> None:
    for scheme, said in ((NF4, "bitsandbytes NF4"), (Scheme("int8"), "bitsandbytes INT8")):
        model, _ = bnb_model(scheme)
        found = run_cli("inspect", model.write(tmp_path / scheme.kind)).out
        assert said in found
        assert "unknown" not in found


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_in_another_dtype(dtype: str, tmp_path: Path) -> None:
    model, meaning = bnb_model(NF4)
    found = converted(model, tmp_path, "--dtype", dtype)
    kind = {"f16": np.float16, "f32": np.float32}[dtype]
    for name, values in meaning.items():
        assert found[name].data == values.astype(kind).tobytes(), name


# --- faults ------------------------------------------------------------------------------------


def _without(part: str) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        del model.tensors[f"{LINEAR}.{part}"]

    return change


def _stating(**more: Any) -> Callable[[Model], None]:
    return lambda model: model.config["quantization_config"].update(more)


def _as(part: str, one: Tensor) -> Callable[[Model], None]:
    return lambda model: model.tensors.update({f"{LINEAR}.{part}": one})


def _state(**more: Any) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        said = json.loads(model.tensors[STATE].data) | more
        model.tensors[STATE] = tensor(np.frombuffer(json.dumps(said).encode(), np.uint8))

    return change


# The kind, a change, what the plan says, and the rule of the source.
FAULTS: dict[str, tuple[Scheme, Callable[[Model], None], str, str | None]] = {
    "no state": (NF4, _without(STATE.removeprefix(f"{LINEAR}.")), "is missing", "QC011"),
    "no table": (NF4, _without("weight.quant_map"), "quant_map' is missing", "QC011"),
    "no inner scales": (NF4, _without("weight.nested_absmax"), "absmax' is missing", "QC011"),
    "no block": (NF4, lambda m: m.config.pop("quantization_config"), "load_in_4bit", "QC012"),
    "8 bits stated": (NF4, _stating(load_in_4bit=False), "load_in_4bit", "QC096"),
    "fp4 stated": (NF4, _stating(bnb_4bit_quant_type="fp4"), "bnb_4bit_quant_type 'fp4'", "QC096"),
    "scales of halves": (
        NF4, _as("weight.absmax", Tensor("F16", (36,), bytes(72))), "expected U8 [", "QC027",
    ),
    "codes in halves": (
        NF4, _as("weight", Tensor("F16", (576, 1), bytes(1152))), "bnb_4bit_quant_storage", None,
    ),
    "a short table": (
        NF4, _as("weight.quant_map", Tensor("F32", (8,), bytes(32))), "F32 [16]", "QC027",
    ),
    "other rows": (NF4, _state(shape=[40, 48]), "states 40 rows of 48", None),
    "no shape": (NF4, _state(shape=None), "expected quant_type nf4, an even blocksize", None),
    "another type": (NF4, _state(quant_type="fp4"), "expected quant_type nf4", None),
    "no offset": (NF4, _state(nested_offset=None), "expected a nested_offset", None),
    "no JSON": (NF4, _as(STATE.removeprefix(f"{LINEAR}."), tensor(np.zeros(9, np.uint8))),
                "expected a JSON", None),
    "SCB in halves": (
        Scheme("int8"), _as("SCB", Tensor("F16", (48,), bytes(96))), "expected SCB F32", "QC027",
    ),
    "an order of kernels": (
        Scheme("int8"), _as("weight_format", Tensor("U8", (), b"\2")), "0 (by row)", None,
    ),
    "4 bits stated": (
        Scheme("int8"), _stating(load_in_8bit=False, load_in_4bit=True), "load_in_8bit", "QC096",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_told_and_found(fault: str, tmp_path: Path) -> None:
    scheme, change, said, rule = FAULTS[fault]
    model, _ = bnb_model(scheme)
    change(model)
    assert said in refused(model, tmp_path)
    if rule is not None:
        assert rule in rules(model, tmp_path / "judged")


def test_scales_without_codes(tmp_path: Path) -> None:
    model, _ = bnb_model(NF4)
    del model.tensors[f"{LINEAR}.weight"]
    assert f"'{LINEAR}.weight' is missing" in refused(model, tmp_path)


@pytest.mark.parametrize("part", ["weight", "weight.absmax", "weight.nested_absmax", "SCB"])
def test_other_numbers_are_found(part: str, tmp_path: Path) -> None:
    """A changed bit of the source, of what the output was not made of."""
    model, _ = bnb_model(Scheme("int8") if part == "SCB" else NF4)
    converted(model, tmp_path)
    one = model.tensors[f"{LINEAR}.{part}"]
    data = one.data[:-1] + bytes([one.data[-1] ^ 0x4])
    model.tensors[f"{LINEAR}.{part}"] = one._replace(data=data)
    args = ("--level", "full", "--against", model.write(tmp_path / "other"), "--json")
    findings = json.loads(run_cli("validate", tmp_path / "out", *args).out)["findings"]
    assert any(one["rule"] == "QC060" and LINEAR in one["where"] for one in findings), findings


# --- the ops -----------------------------------------------------------------------------------

PARTS = ("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax",
         "weight.nested_quant_map")  # fmt: skip


def _op(scheme: Scheme, columns: int) -> DequantBnb4:
    offset = float(np.float32(0.37))
    return DequantBnb4(columns, scheme.block, Nested(256, offset) if scheme.nested else None)


def _flat(parts: dict[str, Tensor]) -> list[Any]:
    taken = [parts[name] for name in PARTS if name in parts]
    counts = [len(one.data) // (4 if one.dtype == "F32" else 1) for one in taken]
    return [
        buffer(TensorType(one.dtype, (count,)), one.data)
        for one, count in zip(taken, counts, strict=True)
    ]


@pytest.mark.parametrize("limit", [None, 1, 3_000, 1 << 20])
@pytest.mark.parametrize("shape", [(37, 64), (50, 33), (41, 48), (300, 1000), (2, 2)])
@pytest.mark.parametrize("scheme", SCHEMES[:4], ids=str)
def test_ragged_sizes_in_parts(scheme: Scheme, shape: tuple[int, int], limit: int | None) -> None:
    parts, values = encode(scheme, "op", *shape) if shape != (2, 2) else encode(scheme, "op", 8, 2)
    (found,), _ = run_op(_op(scheme, shape[1]), _flat(parts), limit)
    assert found == bf16(values).data


def test_rows_are_cut_where_blocks_begin() -> None:
    parts, values = encode(NF4, "op", 1024, 48)
    op = _op(NF4, 48)
    args = tuple(Source(str(n), one.type, 0, 0).output for n, one in enumerate(_flat(parts)))
    step = 64 * 256 // 16
    assert op.row_step() == step
    with pytest.raises(PlanError, match="blocks of 64 cross rows of 48"):
        op.cut(args, 5, 1024, 1024)
    plain = _op(Scheme("nf4"), 48)
    one, cut = plain.cut(args[:3], 4, 9, 1024)
    assert [arg.type.shape for arg in cut] == [(120,), (4,), (16,)]
    assert one.infer(TensorType("U8", (120,)), TensorType("F32", (4,)), cut[2].type)
    assert values.shape == (1024, 48)


def test_int8_of_all_codes() -> None:
    codes = np.tile(np.arange(-128, 128, dtype=np.int8), (300, 1))
    largest = np.geomspace(1e-6, 1e3, 300, dtype=np.float32)
    ins = [
        buffer(TensorType("I8", (300, 256)), codes.tobytes()),
        buffer(TensorType("F32", (300, 1)), largest.tobytes()),
    ]
    wide = torch.from_numpy(codes).float() * torch.from_numpy(largest)[:, None]
    for limit in (None, 1000):
        (found,), _ = run_op(DequantBnb8(), ins, limit)
        assert found == bf16((wide * 7.874015718698502e-3).numpy()).data


@pytest.mark.parametrize("scheme", [Scheme("nf4"), NF4], ids=str)
def test_a_scale_that_is_no_number(scheme: Scheme) -> None:
    parts, _ = encode(scheme, "op", 40, 48)
    name = "weight.nested_absmax" if scheme.nested else "weight.absmax"
    data = parts[name].data[:-4] + b"\0\0\x80\x7f"
    parts[name] = parts[name]._replace(data=data)
    with pytest.raises(RowError, match="has a scale of NaN or infinity"):
        run_op(_op(scheme, 48), _flat(parts))


def test_other_types_are_refused() -> None:
    with pytest.raises(PlanError, match="expected codes in an I8 matrix"):
        DequantBnb8().infer(TensorType("U8", (2, 2)), TensorType("F32", (2, 1)))
    with pytest.raises(PlanError, match="expected SCB"):
        DequantBnb8().infer(TensorType("I8", (2, 2)), TensorType("F32", (3, 1)))


# --- bitsandbytes itself -----------------------------------------------------------------------


def _library() -> Any:
    return pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")


@pytest.mark.peer
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_it_writes_is_read(kind: str, nested: bool, dtype: str, tmp_path: Path) -> None:
    """Its quantizer, its file, its decoder: the one for any device, since that for CPUs takes each row
    for whole blocks."""
    library = _library()
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    model, _ = bnb_model(Scheme(kind, 64, nested))
    weight = torch.randn(48, 48, generator=torch.Generator().manual_seed(3))
    weight = weight.to(getattr(torch, dtype))
    packed, state = library.quantize_4bit(
        weight, quant_type=kind, compress_statistics=nested, blocksize=64
    )
    parts = {"weight": packed}
    parts |= {f"weight.{key}": one for key, one in state.as_dict(packed=True).items()}
    assert {name for name in model.tensors if name.startswith(f"{LINEAR}.")} == {
        f"{LINEAR}.{part}" for part in parts
    }
    model.tensors |= {f"{LINEAR}.{part}": tensor(one.numpy()) for part, one in parts.items()}
    largest = state.absmax
    if nested:
        largest = library.dequantize_blockwise(state.absmax, state.state2) + state.offset
    to = {"bfloat16": ("bf16", "BF16"), "float16": ("f16", "F16"), "float32": ("f32", "F32")}[dtype]
    theirs = _dequantize_4bit_compute(
        packed.reshape(-1), largest.float(), state.code, 64, (48, 48), weight.dtype
    )
    found = converted(model, tmp_path, "--dtype", to[0])[f"{LINEAR}.weight"]
    assert found == Tensor(to[1], (48, 48), theirs.view(torch.uint8).numpy().tobytes())


@pytest.mark.peer
@pytest.mark.parametrize("columns", [64, 128, 33])
@pytest.mark.parametrize("scheme", SCHEMES[:4], ids=str)
def test_it_decodes_all_codes_the_same(scheme: Scheme, columns: int) -> None:
    """Its decoder for CPUs, of rows that are whole blocks, or of an odd length."""
    library = _library()
    columns = columns if columns == 33 else columns * scheme.block // 64
    parts, _ = encode(scheme, "peer", 37, columns)
    arrays = {
        name: torch.frombuffer(
            bytearray(one.data), dtype=torch.float32 if one.dtype == "F32" else torch.uint8
        ).reshape(one.shape)
        for name, one in parts.items()
    }
    beside = {name.removeprefix("weight."): one for name, one in arrays.items() if name != "weight"}
    state = library.QuantState.from_dict(beside, device=torch.device("cpu"))
    theirs = library.dequantize_4bit(arrays["weight"], state).bfloat16()
    (found,), _ = run_op(_op(scheme, columns), _flat(parts))
    assert found == theirs.view(torch.uint8).numpy().tobytes()


@pytest.mark.peer
def test_it_decodes_int8_the_same(tmp_path: Path) -> None:
    library = _library()
    model, _ = bnb_model(Scheme("int8"))
    codes, largest, _ = library.int8_vectorwise_quant(torch.randn(48, 48).half())
    model.tensors |= {
        f"{LINEAR}.weight": tensor(codes.numpy()),
        f"{LINEAR}.SCB": tensor(largest.numpy()),
    }
    theirs = library.int8_vectorwise_dequant(codes, largest).bfloat16()
    found = converted(model, tmp_path)[f"{LINEAR}.weight"]
    assert found == Tensor("BF16", (48, 48), theirs.view(torch.uint8).numpy().tobytes())
