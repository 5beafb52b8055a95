"""MLX's checkpoints are read, judged and converted. Oracle: float64 by hand (mlx_models.py), and, where
mlx is installed, `mlx.core.dequantize` itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import Model, Tensor, read_tensors, run_cli
from dequantized import converted, refused, rules
from mlx_models import (
    KINDS,
    SCHEMES,
    Array,
    Scheme,
    as_tensor,
    encode,
    in_dtype,
    mlx_model,
    with_stacks,
)
from ops_harness import buffer, run_op

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError
from qconvert.formats.mlx.format import DequantMlx

every = pytest.mark.parametrize("scheme", SCHEMES, ids=str)
LINEAR = "model.layers.1.self_attn.q_proj"
G4 = Scheme("affine", 4, 64, "BF16")


@every
def test_a_model_becomes_bf16(scheme: Scheme, tmp_path: Path) -> None:
    model, meaning = mlx_model(scheme)
    encoded = {name.rpartition(".")[0] for name in meaning}
    wanted = {n: t for n, t in model.tensors.items() if n.rpartition(".")[0] not in encoded}
    wanted |= {name: as_tensor(values, "BF16") for name, values in meaning.items()}
    assert not rules(model, tmp_path / "judged")
    assert converted(model, tmp_path) == wanted
    config = json.loads((tmp_path / "out" / "config.json").read_bytes())
    assert not {"quantization", "quantization_config"} & config.keys()


def test_stacks_of_experts_are_taken_apart(tmp_path: Path) -> None:
    """Under the names that transformers' class has; an entry under a stack's path is its experts'."""
    model, meaning = with_stacks(G4)
    found = converted(model, tmp_path)
    for name, values in meaning.items():
        assert found[name] == as_tensor(values, "BF16"), name
    assert not any("switch_mlp" in name for name in found)


def test_codes_in_stacks_are_not_copied(tmp_path: Path) -> None:
    """mlx-lm looks for its own names."""
    model, _ = with_stacks(G4)
    recipe = tmp_path / "copy.yaml"
    recipe.write_text("passes: []\n")
    said = run_cli("run", recipe, model.write(tmp_path / "s"), tmp_path / "o")
    assert said.code == 1
    assert "mlx-lm reads their codes in stacks" in said.err


def test_stacks_of_other_names_stay_stacks(tmp_path: Path) -> None:
    model, _ = mlx_model(G4)
    parts, values = encode(G4, "stack", 3, 8, 64)
    name = "model.layers.0.self_attn.embed_q"
    model.tensors |= {f"{name}.{part}": one for part, one in parts.items()}
    found = converted(model, tmp_path)
    assert found[f"{name}.weight"] == as_tensor(values, "BF16")


def test_modules_have_schemes_of_their_own(tmp_path: Path) -> None:
    """Another scheme, the block's by `true`, and floats by `false`."""
    others: dict[str, Scheme | bool] = {
        LINEAR: Scheme("affine", 6, 32, "F16"),
        "lm_head": Scheme("mxfp4", 4, 32, "U8"),
        "model.layers.0.self_attn.k_proj": True,
        "model.layers.0.self_attn.v_proj": False,
    }
    model, meaning = mlx_model(G4, others)
    assert "model.layers.0.self_attn.v_proj.weight" not in meaning
    found = converted(model, tmp_path)
    for name, values in meaning.items():
        assert found[name] == as_tensor(values, "BF16"), name


@pytest.mark.parametrize(
    "command", [("w4a16", "--rtn", "--group-size", "32"), ("fp8", "--channel")]
)
def test_it_is_quantized_in_one_read(command: tuple[str, ...], tmp_path: Path) -> None:
    """Linears that are no target become BF16: no other config has a place for MLX's codes."""
    model, meaning = with_stacks(G4)
    source, out = model.write(tmp_path / "source"), tmp_path / "out"
    done = run_cli(command[0], source, out, *command[1:], "--jobs", "1")
    assert done.code == 0, done.err
    judged = run_cli("validate", out, "--level", "full", "--against", source)
    assert judged.code == 0, judged.out
    name = "model.embed_tokens.weight"
    assert read_tensors(out)[name] == as_tensor(meaning[name], "BF16")


def test_inspect_names_it(tmp_path: Path) -> None:
    model, _ = mlx_model(G4, {LINEAR: Scheme("mxfp8", 8, 32, "U8"), "lm_head": False})
    model.tensors |= encode(Scheme("affine", 2, 64, "BF16"), "x", 4, 64)[0]
    said = run_cli("inspect", model.write(tmp_path / "s")).out
    assert "MLX INT4 g64" in said
    assert "MLX MXFP8 g32" in said


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("scheme", [G4, Scheme("affine", 5, 64, "F16"), SCHEMES[-1]], ids=str)
def test_in_another_dtype(scheme: Scheme, dtype: str, tmp_path: Path) -> None:
    model, meaning = mlx_model(scheme)
    found = converted(model, tmp_path, "--dtype", dtype)
    for name, values in meaning.items():
        assert found[name] == as_tensor(values, dtype.upper()), name


# --- faults ------------------------------------------------------------------------------------


def _part(model: Model, part: str, change: Any) -> None:
    name = f"{LINEAR}.{part}"
    model.tensors[name] = change(model.tensors[name])


def _without(part: str) -> Any:
    return lambda model: model.tensors.pop(f"{LINEAR}.{part}")


def _stating(**more: Any) -> Any:
    def change(model: Model) -> None:
        for key in ("quantization", "quantization_config"):
            model.config[key] |= more

    return change


def _narrow(model: Model) -> None:
    _part(model, "scales", lambda one: Tensor("F32", (1, 1), bytes(4)))


FAULTS = {
    "no scales": (_without("scales"), "scales' is missing", "QC011"),
    "no biases": (_without("biases"), "biases' is missing", "QC011"),
    "scales of another shape": (_narrow, "expected scales [64, 64 / 64]", "QC027"),
    "left in floats": (_stating(**{LINEAR: False}), "leaves it in floats", "QC034"),
    "7 bits": (_stating(bits=7), "expected group_size 32, 64 or 128 and 1 to 6", "QC097"),
    "an unknown mode": (_stating(mode="int4"), "expected mode affine or mxfp4", "QC097"),
    "biases of floats": (_stating(**{LINEAR: {"mode": "mxfp4"}}), "mode mxfp4 has none", "QC011"),
    "part of a group": (_stating(group_size=48), "expected scales", "QC027"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_told_and_found(fault: str, tmp_path: Path) -> None:
    change, said, rule = FAULTS[fault]
    model, _ = mlx_model(G4)
    change(model)
    assert said in refused(model, tmp_path)
    assert rule in rules(model, tmp_path / "judged")


def test_scales_without_codes(tmp_path: Path) -> None:
    model, _ = mlx_model(G4)
    del model.tensors[f"{LINEAR}.weight"]
    assert f"'{LINEAR}.weight': expected MLX's codes in U32 beside" in refused(model, tmp_path)


def test_blocks_that_differ(tmp_path: Path) -> None:
    model, _ = mlx_model(G4)
    model.config["quantization_config"]["bits"] = 8
    assert "expected one scheme of MLX, found" in refused(model, tmp_path)
    assert "QC037" in rules(model, tmp_path / "judged")


def test_words_that_no_config_states(tmp_path: Path) -> None:
    model, _ = mlx_model(G4)
    model.config = {key: one for key, one in model.config.items() if "quantization" not in key}
    assert "nor the config say how it is encoded" in refused(model, tmp_path)
    assert "QC012" in rules(model, tmp_path / "judged")


def test_numbers_that_mlx_lm_shifts(tmp_path: Path) -> None:
    model, _ = mlx_model(G4)
    model.config |= {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}
    assert "norms of qwen3_next plus 1" in refused(model, tmp_path)


def test_global_scales_of_experts(tmp_path: Path) -> None:
    model, _ = mlx_model(Scheme("nvfp4", 4, 16, "U8"))
    model.tensors[f"{LINEAR}.global_scale"] = as_tensor(np.ones(1), "F32")
    assert "has a global_scale" in refused(model, tmp_path)


@pytest.mark.parametrize("part", ["weight", "scales", "biases"])
def test_other_numbers_are_found(part: str, tmp_path: Path) -> None:
    """A changed bit of the source, of what the output was not made of."""
    model, _ = mlx_model(G4)
    converted(model, tmp_path)
    _part(model, part, lambda one: one._replace(data=one.data[:-1] + bytes([one.data[-1] ^ 4])))
    other = model.write(tmp_path / "other")
    args = ("--level", "full", "--against", other, "--json")
    findings = json.loads(run_cli("validate", tmp_path / "out", *args).out)["findings"]
    assert any(one["rule"] == "QC060" and LINEAR in one["where"] for one in findings), findings


# --- the op ------------------------------------------------------------------------------------


def _run(scheme: Scheme, parts: dict[str, Tensor], limit: int | None) -> bytes:
    ins = [buffer(TensorType(one.dtype, one.shape), one.data) for one in parts.values()]
    op = DequantMlx(scheme.mode, scheme.bits, scheme.group)  # type: ignore[arg-type]
    return run_op(op, ins, limit)[0][0]


@pytest.mark.parametrize("limit", [None, 1, 3_000, 1 << 20])
@every
def test_all_codes_in_parts(scheme: Scheme, limit: int | None) -> None:
    parts, values = encode(scheme, "op", 37, 6 * scheme.group if scheme.group < 64 else 192)
    assert _run(scheme, parts, limit) == as_tensor(values, "BF16").data


def test_large_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles."""
    parts, values = encode(G4, "op", 300, 512)
    assert _run(G4, parts, None) == as_tensor(values, "BF16").data


@pytest.mark.parametrize("part", [1, 2])
def test_a_scale_that_is_no_number(part: int) -> None:
    parts, _ = encode(G4, "op", 3, 128)
    name = list(parts)[part]
    data = parts[name].data[:-2] + b"\xc0\x7f"
    parts[name] = parts[name]._replace(data=data)
    with pytest.raises(RowError, match="row 2 has a scale of NaN or infinity"):
        _run(G4, parts, None)


def test_what_is_beyond_bf16() -> None:
    scheme = Scheme("affine", 8, 32, "F32")
    parts, _ = encode(scheme, "op", 1, 32)
    parts["scales"] = as_tensor(np.array([[1.2e37]]), "F32")
    with pytest.raises(RowError, match="beyond bf16"):
        _run(scheme, parts, None)


def test_other_types_are_refused() -> None:
    op = DequantMlx("affine", 4, 64)
    good = TensorType("U32", (2, 16)), TensorType("F16", (2, 2)), TensorType("F16", (2, 2))
    assert op.infer(*good) == (TensorType("BF16", (2, 128)),)
    for at, wrong in (
        (0, TensorType("I32", (2, 16))), (0, TensorType("U32", (2, 12))),
        (1, TensorType("U8", (2, 2))), (2, TensorType("BF16", (2, 2))),
    ):  # fmt: skip
        with pytest.raises(PlanError, match="expected"):
            op.infer(*(wrong if n == at else one for n, one in enumerate(good)))


# --- mlx itself --------------------------------------------------------------------------------


@pytest.mark.peer
@every
def test_mlx_dequantizes_the_same(scheme: Scheme) -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx[cpu] is not installed")
    mx.set_default_device(mx.cpu)
    parts, values = encode(scheme, "peer", 37, 384)
    kinds = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}

    def array(one: Tensor) -> Any:
        if one.dtype == "U32":
            return mx.array(np.frombuffer(one.data, np.uint32).reshape(one.shape))
        if one.dtype == "U8":
            return mx.array(np.frombuffer(one.data, np.uint8).reshape(one.shape))
        wide = torch.frombuffer(bytearray(one.data), dtype=KINDS[one.dtype]).float().numpy()
        return mx.array(wide.reshape(one.shape)).astype(kinds[one.dtype])

    made = mx.dequantize(
        *map(array, parts.values()), group_size=scheme.group, bits=scheme.bits, mode=scheme.mode
    )
    wide: Array = np.array(made.astype(mx.float32)).astype(np.float64)
    assert np.array_equal(wide, values if scheme.mode == "affine" else in_dtype(values, "BF16"))
    assert _run(scheme, parts, None) == as_tensor(wide, "BF16").data


@pytest.mark.peer
@pytest.mark.parametrize("mode", ["affine", "mxfp4", "nvfp4", "mxfp8"])
def test_what_mlx_writes_is_read(mode: str, tmp_path: Path) -> None:
    """Its own quantizer and its own file."""
    mx = pytest.importorskip("mlx.core", reason="mlx[cpu] is not installed")
    mx.set_default_device(mx.cpu)
    group, bits = {"affine": (64, 3), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}[mode]
    scheme = Scheme(mode, bits, group, "BF16")
    model, _ = mlx_model(scheme if mode != "affine" else Scheme("affine", 3, 64, "BF16"))
    weight = mx.random.normal((64, 64)).astype(mx.bfloat16)
    made = mx.quantize(weight, group_size=group, bits=bits, mode=mode)
    names = dict(zip(("weight", "scales", "biases"), made, strict=False))
    for part, one in names.items():
        data = np.array(one.view(mx.uint16) if one.dtype == mx.bfloat16 else one)
        was = model.tensors[f"{LINEAR}.{part}"]
        assert data.shape == was.shape
        model.tensors[f"{LINEAR}.{part}"] = was._replace(data=data.tobytes())
    back = mx.dequantize(*made, group_size=group, bits=bits, mode=mode).astype(mx.float32)
    found = converted(model, tmp_path)[f"{LINEAR}.weight"]
    assert found == as_tensor(np.array(back).astype(np.float64), "BF16")
