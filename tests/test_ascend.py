"""msmodelslim's checkpoints are read, judged and converted. Oracle: the format's text by hand
(ascend_models.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import models
import numpy as np
import pytest
from ascend_models import KINDS, ascend_model, encode, tensor
from checkpoints import Model, Tensor, read_tensors, run_cli
from dequantized import bf16, converted, refused, rules
from ops_harness import buffer, run_op

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError
from qconvert.core.graph import Source
from qconvert.formats.ascend.format import DequantAscend, Kind

every = pytest.mark.parametrize("kind", KINDS)
LINEAR = "model.layers.1.self_attn.q_proj"
DESCRIPTION = "quant_model_description.json"
DYNAMIC, STATIC, PACKED = "W8A8_DYNAMIC", "W8A8", "W4A8_DYNAMIC"


def stating(model: Model, **more: object) -> None:
    said = json.loads(model.side_files[DESCRIPTION])
    for key, value in more.items():
        said[key] = value
    model.side_files[DESCRIPTION] = json.dumps(said).encode()


@every
def test_a_model_becomes_bf16(kind: str, tmp_path: Path) -> None:
    model, meaning = ascend_model(kind)
    modules = {name.removesuffix(".weight") for name in meaning}
    kept = {n: t for n, t in model.tensors.items() if n.rpartition(".")[0] not in modules}
    assert not rules(model, tmp_path / "judged")
    assert converted(model, tmp_path) == kept | {n: bf16(v) for n, v in meaning.items()}
    assert not (tmp_path / "out" / DESCRIPTION).exists()


@pytest.mark.parametrize("command", [("int8",), ("fp8", "--channel"), ("mx",)])
@pytest.mark.parametrize("kind", [DYNAMIC, STATIC, PACKED])
def test_it_is_quantized_in_one_read(kind: str, command: tuple[str, ...], tmp_path: Path) -> None:
    model, _ = ascend_model(kind)
    source, out = model.write(tmp_path / "source"), tmp_path / "out"
    done = run_cli(command[0], source, out, *command[1:], "--jobs", "1")
    assert done.code == 0 or (command == ("mx",) and "columns" in done.err), done.err
    if done.code == 0:
        judged = run_cli("validate", out, "--level", "full", "--against", source)
        assert judged.code == 0, judged.out


def test_a_copy_stays_as_it_is(tmp_path: Path) -> None:
    model, _ = ascend_model(DYNAMIC)
    source, out = model.write(tmp_path / "source"), tmp_path / "out"
    done = run_cli("run", "copy", source, out, "--jobs", "1")
    assert done.code == 0, done.err
    assert read_tensors(out) == read_tensors(source)
    assert (out / DESCRIPTION).read_bytes() == (source / DESCRIPTION).read_bytes()


def test_files_as_msmodelslim_names_them(tmp_path: Path) -> None:
    """Its index has its own name, and is not the result's."""
    model, meaning = ascend_model(DYNAMIC)
    source = model.write(tmp_path / "source")
    for file in sorted(source.glob("model-*.safetensors")):
        file.rename(source / file.name.replace("model-", "quant_model_weights-"))
    (source / "model.safetensors.index.json").rename(
        source / "quant_model_weights.safetensors.index.json"
    )
    out = tmp_path / "out"
    done = run_cli("dequant", source, out, "--jobs", "1")
    assert done.code == 0, done.err
    assert not list(out.glob("quant_model*"))
    found = read_tensors(out)
    assert all(found[name] == bf16(values) for name, values in meaning.items())


def test_inspect_names_it(tmp_path: Path) -> None:
    model, _ = ascend_model(PACKED)
    found = run_cli("inspect", model.write(tmp_path / "s")).out
    assert "msmodelslim W4A8_DYNAMIC" in found
    assert "unknown" not in found


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_in_another_dtype(dtype: str, tmp_path: Path) -> None:
    model, meaning = ascend_model(DYNAMIC)
    found = converted(model, tmp_path, "--dtype", dtype)
    kind = {"f16": np.float16, "f32": np.float32}[dtype]
    for name, values in meaning.items():
        assert found[name].data == values.astype(kind).tobytes(), name


# --- faults ------------------------------------------------------------------------------------


def _without(part: str) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        del model.tensors[f"{LINEAR}.{part}"]

    return change


def _as(part: str, one: Tensor) -> Callable[[Model], None]:
    return lambda model: model.tensors.update({f"{LINEAR}.{part}": one})


def _stated(value: object, key: str = f"{LINEAR}.weight") -> Callable[[Model], None]:
    return lambda model: stating(model, **{key: value})


FAULTS: dict[str, tuple[str, Callable[[Model], None], str, str | None]] = {
    "no scale": (DYNAMIC, _without("weight_scale"), "weight_scale' is missing", "QC011"),
    "no offset": (DYNAMIC, _without("weight_offset"), "weight_offset' is missing", "QC011"),
    "no scale of inputs": (STATIC, _without("input_scale"), "input_scale' is missing", "QC011"),
    "no codes": (DYNAMIC, _without("weight"), "expected codes in I8", None),
    "said to be floats": (DYNAMIC, _stated("FLOAT"), "found 'FLOAT'", "QC096"),
    "not named": (DYNAMIC, _stated(None), "found None", "QC096"),
    "a type not read": (DYNAMIC, _stated("W4A4_MXFP4"), "found 'W4A4_MXFP4'", "QC096"),
    "an older W4A8": (PACKED, _stated(None, "version"), "expected version 1.0.0", None),
    "another static": (DYNAMIC, _stated(STATIC), "deq_scale' is missing", "QC011"),
    "scales of other rows": (
        DYNAMIC, _as("weight_scale", tensor(np.ones((47, 1), np.float32))),
        "expected weight_scale and weight_offset [48, groups]", "QC027",
    ),
    "integers for scales": (
        STATIC, _as("deq_scale", tensor(np.ones(48, np.int32))), "deq_scale F32 or I64 [48]", "QC027",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_told_and_found(fault: str, tmp_path: Path) -> None:
    kind, change, said, rule = FAULTS[fault]
    model, _ = ascend_model(kind)
    change(model)
    assert said in refused(model, tmp_path)
    if rule is not None:
        assert rule in rules(model, tmp_path / "judged")


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        (DYNAMIC, "weight"), (DYNAMIC, "weight_scale"), ("W8A16", "weight_offset"),
        (STATIC, "deq_scale"), (STATIC, "input_scale"), (PACKED, "weight"),
    ],
)  # fmt: skip
def test_other_numbers_are_found(kind: str, part: str, tmp_path: Path) -> None:
    """A changed bit of the source, of what the output was not made of."""
    model, _ = ascend_model(kind)
    converted(model, tmp_path)
    one = model.tensors[f"{LINEAR}.{part}"]
    data = one.data[:-2] + bytes([one.data[-2] ^ 0x40, one.data[-1]])
    model.tensors[f"{LINEAR}.{part}"] = one._replace(data=data)
    args = ("--level", "full", "--against", model.write(tmp_path / "other"), "--json")
    findings = json.loads(run_cli("validate", tmp_path / "out", *args).out)["findings"]
    assert any(one["rule"] == "QC060" and LINEAR in one["where"] for one in findings), findings


# --- the op ------------------------------------------------------------------------------------


def _args(kind: str, parts: dict[str, Tensor]) -> tuple[DequantAscend, list[Tensor]]:
    if kind.startswith("W8A8") and "DYNAMIC" not in kind and "MIX" not in kind:
        scale = parts["deq_scale"]
        form: Kind = "static"
        taken = [parts["weight"], scale._replace(shape=(*scale.shape, 1)), parts["input_scale"]]
    else:
        form = "packed" if kind == PACKED else "offset"
        taken = [parts[name] for name in ("weight", "weight_scale", "weight_offset")]
    return DequantAscend(form), taken


@pytest.mark.parametrize("limit", [None, 1, 3_000, 1 << 20])
@every
def test_all_codes_in_parts(kind: str, limit: int | None) -> None:
    parts, values = encode(kind, "op", 130, 1008)
    op, taken = _args(kind, parts)
    ins = [buffer(TensorType(one.dtype, one.shape), one.data) for one in taken]
    assert run_op(op, ins, limit)[0][0] == bf16(values).data


def test_rows_of_one_byte_stay_together() -> None:
    parts, _ = encode(PACKED, "op", 8, 16)
    op, taken = _args(PACKED, parts)
    args = tuple(
        Source(str(n), TensorType(one.dtype, one.shape), 0, 0).output for n, one in enumerate(taken)
    )
    _, cut = op.cut(args, 2, 6, 8)
    assert [arg.type.shape for arg in cut] == [(2, 16), (4, 1), (4, 1)]
    with pytest.raises(PlanError, match="2 rows share their bytes"):
        op.cut(args, 3, 8, 8)


@pytest.mark.parametrize("part", [1, 2])
def test_a_scale_that_is_no_number(part: int) -> None:
    parts, _ = encode(DYNAMIC, "op", 8, 32)
    op, taken = _args(DYNAMIC, parts)
    taken[part] = taken[part]._replace(data=taken[part].data[:-4] + b"\0\0\xc0\x7f")
    ins = [buffer(TensorType(one.dtype, one.shape), one.data) for one in taken]
    with pytest.raises(RowError, match="row 7 has a scale of NaN or infinity"):
        run_op(op, ins)


def test_codes_of_another_type_are_refused() -> None:
    scale = TensorType("F32", (2, 1))
    with pytest.raises(PlanError, match="expected codes in an I8 matrix"):
        DequantAscend("offset").infer(TensorType("U8", (2, 2)), scale, scale)


# --- written -----------------------------------------------------------------------------------


def _ordinary() -> Model:
    """A model of ordinary numbers."""
    random, model = np.random.default_rng(5), models.qwen3_moe("bf16", hidden=64, intermediate=48)
    for name, one in model.tensors.items():
        model.tensors[name] = bf16(random.normal(size=one.shape))
    return model


def _written(folder: Path, model: Model, *more: str) -> Path:
    out = folder / "out"
    source = model.write(folder / "source")
    done = run_cli("int8", source, out, "--dialect", "msmodelslim", "--jobs", "1", *more)
    assert done.code == 0, done.err
    assert "read by vllm-ascend (its quantization `ascend`)" in done.err
    judged = run_cli("validate", out, "--level", "full", "--against", source)
    assert judged.code == 0, judged.out
    assert "every weight is the source's within its format's rounding" in judged.out
    return out


def test_int8_is_written_in_its_dialect(tmp_path: Path) -> None:
    """The codes and scales of compressed-tensors' INT8; a description of every tensor; no block in the
    config, which vLLM would take instead."""
    model = _ordinary()
    out = _written(tmp_path, model)
    found = read_tensors(out)
    other = tmp_path / "other"
    assert run_cli("int8", tmp_path / "source", other, "--jobs", "1").code == 0
    wanted = read_tensors(other)
    stated = json.loads((out / DESCRIPTION).read_bytes())
    assert stated.keys() - found.keys() == {
        "model_quant_type", "version", "group_size", "metadata", "optional",
    }  # fmt: skip
    for name, one in wanted.items():
        module, _, part = name.rpartition(".")
        coded = f"{module}.weight_scale" in wanted
        assert stated[name] == (DYNAMIC if coded else "FLOAT"), name
        assert found[name] == one
        if coded and part == "weight_scale":
            zeros = one._replace(data=bytes(len(one.data)))
            assert found[f"{module}.weight_offset"] == zeros
    assert "quantization_config" not in json.loads((out / "config.json").read_bytes())
    assert not rules(
        Model(model.config, found, {DESCRIPTION: (out / DESCRIPTION).read_bytes()}), tmp_path
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    model = _ordinary()
    out = _written(tmp_path, model, "--targets", "experts")
    back = tmp_path / "back"
    assert run_cli("dequant", out, back, "--jobs", "1").code == 0
    assert not (back / DESCRIPTION).exists()
    assert run_cli("validate", back, "--level", "full", "--against", out).code == 0


def test_fp8_layers_cannot_stay(tmp_path: Path) -> None:
    model = models.qwen3_moe("fp8")
    args = ("--dialect", "msmodelslim", "--targets", "experts")
    said = run_cli("int8", model.write(tmp_path / "s"), tmp_path / "o", *args)
    assert said.code == 1
    assert "msmodelslim's description has no place for it" in said.err


@pytest.mark.parametrize(
    ("part", "change"), [("weight", 2), ("weight_scale", 3), ("weight_offset", 3)]
)
def test_wrong_codes_are_found(part: str, change: int, tmp_path: Path) -> None:
    model = _ordinary()
    out = _written(tmp_path, model)
    name = f"{LINEAR}.{part}"
    tensors = read_tensors(out)
    data = bytearray(tensors[name].data)
    data[change] ^= 0x40
    tensors[name] = tensors[name]._replace(data=bytes(data))
    side = {p.name: p.read_bytes() for p in out.iterdir() if not p.name.startswith("model")}
    side = {name: one for name, one in side.items() if name not in ("config.json", "README.md")}
    other = Model(json.loads((out / "config.json").read_bytes()), tensors, side).write(
        tmp_path / "x"
    )
    args = ("--level", "full", "--against", tmp_path / "source", "--json")
    findings = json.loads(run_cli("validate", other, *args).out)["findings"]
    assert any(one["rule"] == "QC060" and LINEAR in one["where"] for one in findings), findings
