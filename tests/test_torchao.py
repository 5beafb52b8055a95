"""torchao's weights that transformers took apart, as sources. Oracles: float64 arithmetic on codes,
rounded once, and, marked `peer`, torchao 0.18, which writes the files and dequantizes (no part of
`make peers`: pip install torchao==0.18)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import (
    Model,
    Tensor,
    edit_header,
    edit_json,
    ran,
    read_tensors,
    refused,
    run_cli,
    shard_name,
)
from encoded_models import FAMILIES, Array, stored
from int_forms import bf16_bits


def _grid(block: tuple[int, int], rows: int, columns: int) -> tuple[int, int]:
    return rows // (block[0] or rows), columns // (block[1] or columns)


def _spread(values: Array, shape: tuple[int, ...]) -> Array:
    rows, columns = shape[0] // values.shape[0], shape[1] // values.shape[1]
    return np.repeat(np.repeat(values, rows, axis=0), columns, axis=1)


def ints(kind: str, bits: int, block: tuple[int, int], *, zero: bool, scale_dtype: str) -> Any:
    """Codes in I8; `block` 0: all rows or columns."""

    def make(
        random: np.random.Generator, rows: int, columns: int
    ) -> tuple[dict[str, Tensor], Array]:
        low, high = -(1 << bits - 1), 1 << bits - 1
        codes = random.integers(low, high, (rows, columns), np.int8)
        grid = _grid(block, rows, columns)
        scale = np.abs(0.01 * random.standard_t(3, grid)).astype(np.float32)
        scale = (bf16_bits(scale).astype(np.uint32) << 16).view(np.float32)
        parts = {"qdata": stored("I8", codes)}
        if scale_dtype == "BF16":
            parts["scale"] = Tensor("BF16", grid, bf16_bits(scale).tobytes())
        else:
            parts["scale"] = stored("F32", scale)
        zeros = np.zeros(grid, np.int8)
        if zero:
            zeros = random.integers(low, high, grid, np.int8)
            parts["zero_point"] = stored("I8", zeros)
        wide = _spread(zeros.astype(np.int64), codes.shape)
        return parts, (codes - wide) * _spread(scale.astype(np.float64), codes.shape)

    return make, kind


def fp8(block: tuple[int, int]) -> Any:
    def make(
        random: np.random.Generator, rows: int, columns: int
    ) -> tuple[dict[str, Tensor], Array]:
        codes = random.integers(0, 256, (rows, columns), np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0x38
        values = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()
        scale = np.abs(0.01 * random.standard_t(3, _grid(block, rows, columns))).astype(np.float32)
        parts = {"qdata": stored("F8_E4M3", codes), "scale": stored("F32", scale)}
        return parts, values * _spread(scale.astype(np.float64), codes.shape)

    return make, "Float8Tensor"


INT8, INTX = "Int8Tensor", "IntxUnpackedToInt8Tensor"
FORMS: dict[str, tuple[Any, tuple[int, int]]] = {
    "int8 rows": (ints(INT8, 8, (1, 0), zero=True, scale_dtype="F32"), (1, 0)),
    "int8 groups": (ints(INT8, 8, (1, 16), zero=True, scale_dtype="F32"), (1, 16)),
    "int8 symmetric": (ints(INT8, 8, (1, 0), zero=False, scale_dtype="F32"), (1, 0)),
    "int4 groups": (ints(INTX, 4, (1, 16), zero=True, scale_dtype="BF16"), (1, 16)),
    "intx rows": (ints(INTX, 8, (1, 0), zero=True, scale_dtype="BF16"), (1, 0)),
    "fp8 rows": (fp8((1, 0)), (1, 0)),
    "fp8 tensor": (fp8((0, 0)), (0, 0)),
    "fp8 blocks": (fp8((16, 16)), (16, 16)),
}  # fmt: skip


def torchao(form: str, family: str = "qwen3_moe") -> tuple[Model, dict[str, Array], dict[str, str]]:
    """A model whose experts' matrices are a class of torchao's: its tensors, what each matrix means, and
    the metadata of its headers."""
    model, ((make, kind), block) = FAMILIES[family](), FORMS[form]
    model.config["quantization_config"] = {
        "quant_method": "torchao", "modules_to_not_convert": None, "quant_type": {"default": {}},
    }  # fmt: skip
    tensors, meaning = dict[str, Tensor](), dict[str, Array]()
    metadata = {"format": "pt"}
    random = np.random.default_rng(3)
    for name, value in model.tensors.items():
        if ".experts." not in name or not name.endswith(".weight"):
            if not name.endswith("_scale_inv"):
                size = value.shape
                is_plain = value.dtype == "BF16"
                tensors[name] = value if is_plain else stored("F32", np.ones(size, np.float32))
                metadata[name] = json.dumps({"_type": "Tensor"})
            continue
        parts, meaning[name] = make(random, *value.shape)
        sides = [side or whole for side, whole in zip(block, value.shape, strict=True)]
        said = {"_type": kind, "_data": {"block_size": sides}, "_tensor_data_names": [*parts]}
        metadata[name] = json.dumps(said)
        module = name.removesuffix(".weight")
        tensors |= {f"{module}._weight_{part}": one for part, one in parts.items()}
    return replace(model, tensors=tensors), meaning, metadata


def written(
    folder: Path, form: str, change: Callable[[dict[str, str]], None] | None = None
) -> Path:
    model, _, metadata = torchao(form)
    model.write(folder)
    if change is not None:
        change(metadata)
    for number in (1, 2):  # transformers writes all of it into each
        edit_header(folder / shard_name(number), lambda t: t.update(__metadata__=metadata))
    return folder


def as_bf16(values: Array) -> bytes:
    """Products of integers and bf16, or of e4m3 and float32, are exact in float64 and round once; those
    with float32 scales are rounded to float32 before, as torchao has them."""
    exact = torch.from_numpy(np.ascontiguousarray(values)).float().bfloat16()
    return exact.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("form", FORMS)
def test_a_model_becomes_bf16(form: str, tmp_path: Path) -> None:
    model, meaning, _ = torchao(form)
    source, out = written(tmp_path / "source", form), tmp_path / "out"
    ran("dequant", source, out, "--jobs", "1")
    found = read_tensors(out)
    plain = {name: t for name, t in model.tensors.items() if "._weight_" not in name}
    wanted = {n: Tensor("BF16", v.shape, as_bf16(v)) for n, v in meaning.items()}
    assert found == plain | wanted
    assert "quantization_config" not in json.loads((out / "config.json").read_bytes())
    judged = run_cli("validate", out, "--level", "full", "--against", source)
    assert judged.code == 0, judged.out
    assert "every weight is the source's within its format's rounding" in judged.out


def test_inspect_says_whose_they_are(tmp_path: Path) -> None:
    shown = ran("inspect", written(tmp_path / "s", "int8 groups")).out
    assert "weights of torchao (Int8Tensor) read as compressed-tensors has them" in shown


def test_a_copy_is_in_words_of_compressed_tensors(tmp_path: Path) -> None:
    """Names and config say the same of the same bytes."""
    source, recipe = written(tmp_path / "source", "fp8 blocks"), tmp_path / "copy.yaml"
    recipe.write_text("passes: []\n")
    ran("run", recipe, source, tmp_path / "copy")
    ran("dequant", source, tmp_path / "one")
    ran("dequant", tmp_path / "copy", tmp_path / "two")
    assert read_tensors(tmp_path / "one") == read_tensors(tmp_path / "two")
    block = json.loads((tmp_path / "copy" / "config.json").read_bytes())["quantization_config"]
    assert (block["quant_method"], block["format"]) == ("compressed-tensors", "float-quantized")
    judged = run_cli("validate", tmp_path / "copy", "--level", "full", "--against", source)
    assert judged.code == 0, judged.out


def test_plain_tensors_stay_what_they_are(tmp_path: Path) -> None:
    source = written(tmp_path / "source", "int8 rows", dict[str, str].clear)
    assert "no header says of which class of torchao it is" in refused("inspect", source)
    edit_json(source / "config.json", lambda c: c.pop("quantization_config"))
    assert "read as compressed-tensors" not in ran("inspect", source).out
    plain = FAMILIES["qwen3_moe"]()
    plain.config["quantization_config"] = {"quant_method": "torchao"}
    assert "read as compressed-tensors" not in ran("inspect", plain.write(tmp_path / "plain")).out


_NAME = "model.layers.0.mlp.experts.0.up_proj.weight"


def _told(**changes: Any) -> Callable[[dict[str, str]], None]:
    """A description of one weight with some of it changed."""

    def change(metadata: dict[str, str]) -> None:
        metadata[_NAME] = json.dumps({**json.loads(metadata[_NAME]), **changes})

    return change


def _renamed(metadata: dict[str, str]) -> None:
    metadata["model.layers.0.mlp.experts.0.up_proj.other"] = metadata.pop(_NAME)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_told(_type="Int4Tensor"), "torchao's Int4Tensor is not read here: Float8Tensor, Int8Tensor"),
        (_told(_tensor_data_names=["qdata"]), "has parts ['qdata']: expected codes and scales"),
        (
            _told(_tensor_data_names=["qdata", "scale", "act_pre_scale"]),
            "has parts ['qdata', 'scale', 'act_pre_scale']: expected codes and scales",
        ),
        (_told(_data={"block_size": [1, 7]}), "blocks of [1, 7] do not fit I8"),
        (_told(_data={"block_size": 3}), "blocks of 3 do not fit"),
        (_told(_data={"block_size": [1, 8]}), "expected scales [256, 16] for I8 [256, 128] in blocks"),
        (_told(_type="Float8Tensor"), "expected a matrix of F8_E4M3 in torchao's Float8Tensor"),
        (_renamed, "up_proj._other_qdata' is missing, a part of torchao's Int8Tensor"),
        (lambda metadata: metadata.pop(_NAME), "no header says of which class of torchao it is"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused(change: Any, said: str, tmp_path: Path) -> None:
    source = written(tmp_path / "source", "int8 rows", change)
    assert said in refused("inspect", source)


def test_scales_of_several_rows_are_refused_of_integers(tmp_path: Path) -> None:
    FORMS["tall"] = ints(INT8, 8, (16, 0), zero=False, scale_dtype="F32"), (16, 0)
    try:
        source = written(tmp_path / "source", "tall")
    finally:
        del FORMS["tall"]
    assert "is read with scales of each row only" in refused("inspect", source)


# --- peer ------------------------------------------------------------------------------------------


@pytest.mark.peer
def test_torchao_means_the_same(tmp_path: Path) -> None:
    """Every class that torchao writes on a CPU, by transformers' TorchAoConfig."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    import transformers

    hf: Any = transformers
    four: Any = torch.int4  # type: ignore[attr-defined]
    rows = quantization.PerGroup(32)
    asymmetric = quantization.MappingType.ASYMMETRIC
    forms = [
        quantization.Int8WeightOnlyConfig(),
        quantization.Int8WeightOnlyConfig(granularity=rows, version=2),
        quantization.Int8DynamicActivationInt8WeightConfig(version=2),
        quantization.Float8WeightOnlyConfig(),
        quantization.IntxWeightOnlyConfig(weight_dtype=torch.int8),
        quantization.IntxWeightOnlyConfig(four, granularity=rows, mapping_type=asymmetric),
        quantization.Int8DynamicActivationIntxWeightConfig(four, weight_granularity=rows),
    ]
    config = hf.Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    hf.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    for number, form in enumerate(forms):
        model = hf.AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", dtype=torch.bfloat16, quantization_config=hf.TorchAoConfig(form)
        )
        source, out = tmp_path / f"source-{number}", tmp_path / f"out-{number}"
        model.save_pretrained(source)
        ran("dequant", source, out)
        found = read_tensors(out)
        for name, value in model.state_dict().items():
            plain = value.dequantize() if type(value) is not torch.Tensor else value
            wanted = plain.detach().contiguous().view(torch.uint8).numpy().tobytes()
            assert found[name].data == wanted, (form, name)
