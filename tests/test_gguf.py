"""GGUF files as sources. Oracles: the `gguf` package's own numbers, and marked `peer` transformers'
reading of whole files."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import bf16_moe, ran, read_tensors, refused, run_cli
from dequantized import bf16
from gguf_files import (
    ARCHITECTURES,
    CODED,
    HEAD,
    HEADS,
    WRITTEN,
    Array,
    GgufModel,
    blocks,
    meaning,
    model,
)
from ops_harness import buffer, run_op

from qconvert.checkpoint.gguf import header
from qconvert.checkpoint.gguf import source as gguf_source
from qconvert.checkpoint.gguf.header import TYPES, read_gguf
from qconvert.checkpoint.open import open_source
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import CheckpointError, PlanError, RowError
from qconvert.formats.gguf.format import DequantGguf, DequantGgufStack
from qconvert.ops.cast import DequantTo
from qconvert.validators.formats.gguf import block_floats


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers are made anew; what is known of classes is kept for all tests, since it takes 10 s."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))


def converted(file: Path, out: Path, *words: str) -> dict[str, Any]:
    """Tensors that a command makes, in which `validate --level full` finds no error."""
    command, *more = words or ("dequant",)
    ran(command, file, out, "--jobs", "1", *more)
    judged = run_cli("validate", out, "--level", "full", "--against", file, "--json")
    report = json.loads(judged.out)
    assert judged.code == 0, [one for one in report["findings"] if one["severity"] == "error"]
    assert "every weight is the source's within its format's rounding" in json.dumps(report)
    return read_tensors(out)


# --- types -----------------------------------------------------------------------------------------


def test_block_sizes_are_those_of_gguf() -> None:
    sizes = {name: tuple(size) for name, size in TYPES.items()}
    assert sizes == {n: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[n]] for n in sizes}


@pytest.mark.parametrize("limit", [None, 1, 5_000])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", CODED)
def test_any_blocks_are_what_gguf_reads(kind: str, count: int, limit: int | None) -> None:
    data = blocks(kind, 23, count, np.random.default_rng(count))
    wanted = meaning(kind, data)
    stored = buffer(TensorType("U8", data.shape), data.tobytes())
    (found,), _ = run_op(DequantGguf(kind), [stored], limit)
    assert found == bf16(wanted).data
    (exact,), _ = run_op(DequantTo(DequantGguf(kind), "F32"), [stored], limit)
    assert exact == wanted.tobytes()
    assert np.array_equal(block_floats(kind, data.reshape(-1), "U8"), wanted.reshape(-1))


@pytest.mark.parametrize("kind", CODED)
def test_every_byte_of_codes_is_read(kind: str) -> None:
    """Each byte of a block takes all its values, the others being fixed."""
    data = np.repeat(blocks(kind, 1, 1, np.random.default_rng(5)), 256, axis=0)
    for byte in range(data.shape[1]):
        each = data.copy()
        each[:, byte] = np.arange(256)
        wanted = meaning(kind, each)
        finite = np.isfinite(wanted).all(axis=1)  # scales, and powers beyond float32
        each, wanted = each[finite], wanted[finite]
        stored = buffer(TensorType("U8", each.shape), each.tobytes())
        (exact,), _ = run_op(DequantTo(DequantGguf(kind), "F32"), [stored])
        assert exact == wanted.tobytes(), byte
        assert block_floats(kind, each.reshape(-1), "U8").tobytes() == wanted.tobytes(), byte


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_halves_of_heads_part_by_part(dtype: str) -> None:
    """[heads, size / 2, 2, K] -> [heads, 2, size / 2, K]."""
    values = torch.arange(6 * 8 * 5, dtype=torch.float32)
    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    data = values.to(kinds[dtype]).view(torch.uint8).numpy().tobytes()
    wanted = values.reshape(6, 4, 2, 5).swapaxes(1, 2).bfloat16().contiguous()
    for limit in (None, 1, 300):
        stored = buffer(TensorType(dtype, (48, 5)), data)
        (found,), _ = run_op(DequantGguf(dtype, 8), [stored], limit)
        assert found == wanted.view(torch.uint8).numpy().tobytes()


def test_rows_of_a_head_stay_together() -> None:
    op, source = DequantGguf("F32", 8), TensorType("F32", (48, 5))
    with pytest.raises(PlanError, match=r"rows \[4, 8\) part a head of 8 rows"):
        op.cut((_output(source),), 4, 8, 48)
    assert op.cut((_output(source),), 8, 24, 48)[1][0].type.shape == (16, 5)
    with pytest.raises(PlanError, match="expected rows in heads of 10"):
        DequantGguf("F32", 10).infer(source)
    with pytest.raises(PlanError, match="expected Q4_0 in blocks of 18 bytes"):
        DequantGguf("Q4_0").infer(TensorType("U8", (4, 20)))
    with pytest.raises(PlanError, match="expected a matrix of Q4_0"):
        DequantGguf("Q4_0").infer(source)


def _output(kind: TensorType) -> Any:
    from qconvert.core.graph import Source

    return Source("w", kind, 0, 0).output


@pytest.mark.parametrize(
    ("scale", "what"), [(b"\0\x7e", "NaN or infinity"), (b"\0\xfc", "NaN or inf")]
)
def test_a_scale_that_is_no_number_is_refused(scale: bytes, what: str) -> None:
    data = blocks("Q4_0", 5, 2, np.random.default_rng(1))
    data[3, 18:20] = np.frombuffer(scale, np.uint8)
    data[3, 20:] = 0
    stored = buffer(TensorType("U8", data.shape), data.tobytes())
    with pytest.raises(RowError, match=f"row 3 holds {what}"):
        run_op(DequantGguf("Q4_0"), [stored])


def test_a_power_beyond_bf16_is_refused() -> None:
    data = np.zeros((2, 17), np.uint8)
    data[1, :2] = 252, 0x07
    stored = buffer(TensorType("U8", data.shape), data.tobytes())
    (found,), _ = run_op(DequantGguf("MXFP4"), [stored])  # 6 * 2^125
    assert found == bf16(meaning("MXFP4", data)).data
    data[1, 0] = 253
    stored = buffer(TensorType("U8", data.shape), data.tobytes())
    with pytest.raises(RowError, match="row 1 holds NaN or infinity"):
        run_op(DequantGguf("MXFP4"), [stored])


# --- models ----------------------------------------------------------------------------------------


def _wanted(made: GgufModel) -> dict[str, bytes]:
    return {name: bf16(values).data for name, values in made.means.items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_file_becomes_a_folder(architecture: str, tmp_path: Path) -> None:
    made = model(architecture, "Q8_0")
    file = made.write(tmp_path / "model.gguf")
    found = converted(file, tmp_path / "out")
    assert {name: t.data for name, t in found.items()} == _wanted(made)
    assert {t.dtype for t in found.values()} == {"BF16"}
    config = json.loads((tmp_path / "out" / "config.json").read_bytes())
    assert "quantization_config" not in config
    assert (config["rms_norm_eps"], config["head_dim"]) == (1e-6, HEAD)
    assert config["tie_word_embeddings"] is (architecture == "gemma3")


@pytest.mark.parametrize("kind", [kind for kind in WRITTEN if kind != "Q8_0"])
def test_a_file_of_each_type(kind: str, tmp_path: Path) -> None:
    made = model("llama", kind)
    file = made.write(tmp_path / "model.gguf")
    found = converted(file, tmp_path / "out")
    assert {name: t.data for name, t in found.items()} == _wanted(made)


@pytest.mark.parametrize("kind", ["MXFP4", "F16", "BF16", "Q4_1"])
def test_stacks_of_each_type(kind: str, tmp_path: Path) -> None:
    """gpt-oss is published in MXFP4."""
    made = model("gpt-oss", kind)
    file = made.write(tmp_path / "model.gguf", _TOKENIZER)
    found = converted(file, tmp_path / "out")
    assert {name: t.data for name, t in found.items()} == _wanted(made)
    config = json.loads((tmp_path / "out" / "config.json").read_bytes())
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert "transformers makes no tokenizer of it" in ran("inspect", file).out


@pytest.mark.parametrize("limit", [None, 1, 9_000])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_two_stacks_part_by_part(kind: str, limit: int | None) -> None:
    random = np.random.default_rng(1)
    pair = [blocks(kind, 5 * 7, 2, random).reshape(5, 7, -1) for _ in range(2)]
    ins = [buffer(TensorType("U8", one.shape), one.tobytes()) for one in pair]
    (found,), _ = run_op(DequantGgufStack(kind), ins, limit)
    wanted = np.stack([meaning(kind, one) for one in pair], axis=2).reshape(5, 14, -1)
    assert found == bf16(wanted.swapaxes(1, 2)).data
    with pytest.raises(PlanError, match="expected two tensors alike"):
        DequantGgufStack(kind).infer(ins[0].type, TensorType("U8", (5, 8, 3)))
    with pytest.raises(PlanError, match="expected a stack of matrices"):
        DequantGgufStack("F32").infer(TensorType("F32", (5,)))


def test_numbers_in_f32(tmp_path: Path) -> None:
    """Vectors too, with 1 taken from Gemma's."""
    made = model("gemma3", "Q5_1")
    found = converted(
        made.write(tmp_path / "m.gguf"), tmp_path / "out", "dequant", "--dtype", "f32"
    )
    assert {n: t.data for n, t in found.items()} == {n: v.tobytes() for n, v in made.means.items()}


@pytest.mark.parametrize(
    "words", [("int8",), ("w4a16", "--rtn", "--targets", "Linear", "--group-size", "32")]
)
def test_a_file_is_quantized_in_one_read(words: tuple[str, ...], tmp_path: Path) -> None:
    """Linears that stay unquantized are decoded."""
    made = model("llama", "Q4_1")
    file = made.write(tmp_path / "model.gguf")
    found = converted(file, tmp_path / "out", *words)
    ran("dequant", file, tmp_path / "plain")
    ran(words[0], tmp_path / "plain", tmp_path / "twice", *words[1:])
    assert found == read_tensors(tmp_path / "twice")
    assert found["model.embed_tokens.weight"].dtype == "BF16"


def test_experts_are_quantized_in_one_read(tmp_path: Path) -> None:
    made = model("qwen3moe", "F16")
    file = made.write(tmp_path / "model.gguf")
    ran("dequant", file, tmp_path / "plain")
    outs = []
    for source in (file, tmp_path / "plain"):
        outs.append(tmp_path / f"of-{source.name}")
        ran("nvfp4", source, outs[-1], "--dialect", "modelopt", "--weight-only")
    assert read_tensors(outs[0]) == read_tensors(outs[1])


def test_norms_in_other_types(tmp_path: Path) -> None:
    """llama.cpp writes F32; others may not."""
    made = model("gemma3", "F16")
    for name, (kind, data) in made.stored.items():
        if name.endswith("norm.weight"):
            assert kind == "F32"
            made.stored[name] = "F16", data.astype(np.float16)
    found = converted(made.write(tmp_path / "m.gguf"), tmp_path / "out")
    name = "model.norm.weight"
    stored = made.stored["output_norm.weight"][1]
    assert found[name].data == bf16(stored.astype(np.float32) - np.float32(1)).data


def test_only_gguf_files_are_read_so(tmp_path: Path) -> None:
    """Whatever a folder's config says."""
    made = bf16_moe()
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    block = {"quant_method": "gguf", "types": {name: "BF16"}}
    made.config["quantization_config"] = {**block, "interleaved_halves": {name: 8}, "plus_one": []}
    folder = made.write(tmp_path / "in")
    assert "no quantized weight found" in refused("dequant", folder, tmp_path / "out")
    assert "states quant_method 'gguf'" in run_cli("validate", folder).out


def test_no_folder_holds_blocks(tmp_path: Path) -> None:
    file = model("llama", "Q4_0").write(tmp_path / "model.gguf")
    recipe = tmp_path / "copy.yaml"
    recipe.write_text("passes: []\n")
    assert "run `qconvert dequant` on it" in refused("run", recipe, file, tmp_path / "out")


def test_inspect_names_the_types(tmp_path: Path) -> None:
    file = model("qwen3", "Q4_1").write(tmp_path / "model.gguf")
    shown = ran("inspect", file).out
    assert "Q4_1" in shown
    stacks = ran("inspect", model("gpt-oss", "MXFP4").write(tmp_path / "stacks.gguf")).out
    assert "MXFP4" in stacks
    assert "U8" not in stacks
    assert f"{file}: 1 file" in shown
    assert "holds no tokenizer" in shown


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_of_a_model(parts: int, tmp_path: Path) -> None:
    made = model("llama", "Q8_0")
    names, files = list(made.stored), []
    for part in range(parts):
        some = names[part::parts]
        files.append(tmp_path / f"m-{part + 1:05}-of-{parts:05}.gguf")
        facts = {"split.no": part, "split.count": parts, "split.tensors.count": len(names)}
        made.write(files[-1], facts, some)
    found = converted(files[-1], tmp_path / "out")
    assert {name: t.data for name, t in found.items()} == _wanted(made)
    elsewhere = files[0].rename(tmp_path / "elsewhere")
    (tmp_path / "in").mkdir()
    for one in files[1:]:
        one.rename(tmp_path / "in" / one.name)
    (tmp_path / "in" / files[0].name).symlink_to(elsewhere)
    assert "is a link that lea" in refused("inspect", tmp_path / "in" / files[1].name)
    ran("inspect", tmp_path / "in" / files[1].name, "--follow-links")
    for one in sorted((tmp_path / "in").iterdir()):
        one.rename(tmp_path / one.name)
    files[0].unlink()
    elsewhere.rename(files[0])
    renamed = files[0].rename(tmp_path / "renamed.gguf")
    assert f"is one of {parts} parts" in refused("inspect", renamed)
    assert "No such file" in refused("inspect", files[1])
    made.write(files[0], {"split.count": parts, "split.tensors.count": 99}, names[:1])
    assert "expected 99 by split.tensors.count, found" in refused("inspect", files[0])


def test_wrong_weights_are_found(tmp_path: Path) -> None:
    """A weight off by a step, and rows of a head left in the order of the file."""
    made = model("llama", "Q4_1")
    file = made.write(tmp_path / "model.gguf")
    stacks = model("gpt-oss", "MXFP4").write(tmp_path / "stacks.gguf")
    wrong = {"self_attn.v_proj.weight": _step, "self_attn.q_proj.weight": _swapped}
    _check_found(file, tmp_path / "a", wrong)
    wrong = {"mlp.experts.gate_up_proj": _other_turn, "mlp.experts.down_proj_bias": _step}
    _check_found(stacks, tmp_path / "b", wrong)


def _check_found(file: Path, folder: Path, wrong: Mapping[str, Callable[[bytes], bytes]]) -> None:
    for name, change in wrong.items():
        out = folder / name
        ran("dequant", file, out)
        shard = out / "model.safetensors"
        (length,) = struct.unpack("<Q", shard.read_bytes()[:8])
        header = json.loads(shard.read_bytes()[8 : 8 + length])
        start, stop = header[f"model.layers.0.{name}"]["data_offsets"]
        data = bytearray(shard.read_bytes())
        begin = 8 + length
        data[begin + start : begin + stop] = change(bytes(data[begin + start : begin + stop]))
        shard.write_bytes(data)
        for made_by in ("qconvert.json", "qconvert.receipt.jsonl"):
            (out / made_by).unlink()
        judged = run_cli("validate", out, "--level", "full", "--against", file)
        assert f"QC060 model.layers.0.{name}" in judged.out


def _other_turn(data: bytes) -> bytes:
    """Up before gate."""
    return np.frombuffer(data, np.uint16).reshape(-1, 2)[:, ::-1].tobytes()


def _step(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def _swapped(data: bytes) -> bytes:
    """Rows as the file has them."""
    rows = np.frombuffer(data, np.uint16).reshape(HEADS, 2, HEAD // 2, -1)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).tobytes()


# --- config ----------------------------------------------------------------------------------------


def _config(file: Path) -> dict[str, Any]:
    return dict(open_source(file).config)


def test_scaled_positions(tmp_path: Path) -> None:
    made = model("qwen2", "F16")
    scaling = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    original = {"rope.scaling.original_context_length": 32}
    found = _config(made.write(tmp_path / "a.gguf", {**scaling, **original}))
    assert found["rope_scaling"] == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
    }  # fmt: skip
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    found = _config(made.write(tmp_path / "b.gguf", linear))
    assert found["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert "rope_scaling" not in _config(made.write(tmp_path / "c.gguf"))
    other = {**linear, "rope.scaling.type": "longrope"}
    said = refused("inspect", made.write(tmp_path / "d.gguf", other))
    assert "rotary positions scaled by 'longrope' with factor 8.0 are not read here" in said


def _llama3(factor: float, theta: float, size: int) -> Array:
    """As transformers computes them (`_compute_llama3_parameters`), as factors."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": theta,
    }  # fmt: skip
    config = LlamaConfig(
        hidden_size=size, num_attention_heads=1, head_dim=size, rope_parameters=scaling,
        max_position_embeddings=131072,
    )  # fmt: skip
    found, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    return (plain / found.double()).float().numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_frequencies_of_llama_3(factor: float, tmp_path: Path) -> None:
    """A GGUF has them computed; the config states what they were computed from."""
    made = model("llama", "F16")
    made.facts["rope.freq_base"] = 500000.0
    made.stored["rope_freqs.weight"] = ("F32", _llama3(factor, 500000.0, HEAD))
    file = made.write(tmp_path / "m.gguf")
    assert _config(file)["rope_scaling"] == {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert "rope_freqs.weight" not in open_source(file)
    made.stored["rope_freqs.weight"][1][3] *= 1.01
    said = refused("inspect", made.write(tmp_path / "n.gguf"))
    assert "'rope_freqs.weight' holds other frequencies than Llama 3's" in said
    made.stored["rope_freqs.weight"] = (
        "F16",
        made.stored["rope_freqs.weight"][1].astype(np.float16),
    )
    assert "expected a vector of F32" in refused("inspect", made.write(tmp_path / "o.gguf"))


def test_what_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    made = model("llama", "F16")
    file = tmp_path / "m.gguf"
    made.facts["vocab_size"] = "many"  # of no use
    made.facts["block_count"] = "two"
    assert "expected a number above 0 as llama.block_count, found 'two'" in refused(
        "inspect", made.write(file)
    )
    made.facts["block_count"] = 0
    assert "above 0 as llama.block_count, found 0" in refused("inspect", made.write(file))
    made.facts["block_count"] = 1 << 31
    assert "expected tensors of 2,147,483,648 layers" in refused("inspect", made.write(file))
    del made.facts["block_count"]
    assert "llama.block_count, found nothing" in refused("inspect", made.write(file))
    made = model("llama", "F16")
    del made.stored["token_embd.weight"]
    assert "tensor 'token_embd.weight' is missing" in refused("inspect", made.write(file))
    made = model("llama", "F16")
    made.stored["blk.0.attn_rot.weight"] = made.stored["blk.0.attn_q.weight"]
    said = refused("inspect", made.write(file))
    assert "'blk.0.attn_rot.weight' is not of a LlamaForCausalLM as it is read here" in said
    other = GgufModel("falcon", dict(model("llama", "F16").facts), made.stored)
    assert "architecture 'falcon' is not read here; llama, qwen2" in refused(
        "inspect", other.write(file)
    )
    half = model("gpt-oss", "F16")
    del half.stored["blk.1.ffn_up_exps.weight"]
    said = refused("inspect", half.write(file))
    assert "of 'model.layers.1.mlp.experts.gate_up_proj' gate or up is missing" in said
    other = model("gpt-oss", "F16")
    other.stored["blk.1.ffn_up_exps.weight"] = model("gpt-oss", "F32").stored[
        "blk.1.ffn_up_exps.weight"
    ]
    assert "gate_up_proj' are of different types" in refused("inspect", other.write(file))
    moe = model("qwen3moe", "F16")
    moe.stored["blk.0.ffn_up_exps.weight"] = moe.stored["blk.0.attn_q.weight"]
    assert "expected a stack of matrices" in refused("inspect", moe.write(file))
    made = model("llama", "F16")
    made.stored["blk.1.attn_q.weight"] = ("F16", made.stored["blk.1.attn_q.weight"][1][:-3])
    assert "expected rows in heads of 16, found [61, 64]" in refused("inspect", made.write(file))


def test_no_result_and_no_folder(tmp_path: Path) -> None:
    file = model("llama", "F16").write(tmp_path / "model.gguf")
    assert "is a GGUF file: a source to convert" in run_cli("validate", file).out
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert f"name a GGUF file, as {file}" in refused("inspect", tmp_path)


# --- the header ------------------------------------------------------------------------------------


def _entry(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    raw = name.encode()
    dims = struct.pack(f"<{len(shape)}Q", *shape[::-1])
    return (
        struct.pack("<Q", len(raw)) + raw + struct.pack("<I", len(shape)) + dims
        + struct.pack("<IQ", kind, offset)
    )  # fmt: skip


def _file(
    folder: Path, *entries: bytes, facts: bytes = b"", count: int = 0, data: int = 256
) -> Path:
    file = folder / "m.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, len(entries), count) + facts + b"".join(entries)
    file.write_bytes(head + bytes(-len(head) % 32 + data))
    return file


def _fact(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def test_a_header(tmp_path: Path) -> None:
    texts = struct.pack("<IQ", 8, 2) + 2 * (struct.pack("<Q", 1) + b"x")
    facts = [
        _fact("a", 6, struct.pack("<f", 0.5)), _fact("b", 9, texts), _fact("c", 7, b"\1"),
        _fact("d", 9, struct.pack("<IQ2h", 3, 2, -1, 5)),
        _fact("general.alignment", 4, struct.pack("<I", 64)),
    ]  # fmt: skip
    file = _file(tmp_path, _entry("w", (3, 64), 8, 0), facts=b"".join(facts), count=5, data=512)
    found = read_gguf(file)
    assert dict(found.facts) == {
        "a": 0.5, "b": (2,), "c": True, "d": (-1, 5), "general.alignment": 64,
    }  # fmt: skip
    (one,) = found.tensors
    assert (one.name, one.kind, one.shape, one.offset % 64) == ("w", "Q8_0", (3, 64), 0)
    assert one.stored == TensorType("U8", (3, 68))


def test_a_header_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _file(tmp_path, _entry("w", (3, 64), 8, 0))
    monkeypatch.setattr(header, "_MOST_HEADER", 50)
    with pytest.raises(CheckpointError, match="expected a header of at most 50 B, found more"):
        read_gguf(file)


@pytest.mark.parametrize("seed", range(40))
def test_changed_headers_end_in_one_error(seed: int, tmp_path: Path) -> None:
    """Bytes of a header changed at random: the file opens, or is refused."""
    random = np.random.default_rng(seed)
    file = model(ARCHITECTURES[seed % len(ARCHITECTURES)], "Q8_0").write(tmp_path / "m.gguf")
    data = bytearray(file.read_bytes())
    for at in random.integers(8, 3000, 1 + seed % 3):
        data[at] = random.integers(0, 256)
    file.write_bytes(data)
    with contextlib.suppress(CheckpointError):
        open_source(file)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda f: f.write_bytes(b"GGML" + bytes(40)), "does not begin with GGUF"),
        (lambda f: f.write_bytes(b"GGUF\0\0\0\3" + bytes(40)), "little-endian, found 50331648"),
        (lambda f: f.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0)), "ends within its header"),
        (lambda f: f.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0)), "at most 1,048,576"),
        (lambda f: _file(f.parent, _entry("w", (1,) * 5, 0, 0)), "'w' has 5 dimensions"),
        (lambda f: _file(f.parent, _entry("w", (0, 1), 0, 0)), "'w' has no elements"),
        (lambda f: _file(f.parent, _entry("w", (2, 256), 16, 0)), "tensor 'w' is IQ2_XXS, which is not"),
        (lambda f: _file(f.parent, _entry("w", (2, 256), 99, 0)), "tensor 'w' is type 99"),
        (lambda f: _file(f.parent, _entry("w", (2, 33), 8, 0)), "rows in blocks of 32 for Q8_0"),
        (lambda f: _file(f.parent, *2 * [_entry("w", (2,), 0, 0)]), "names tensor 'w' twice"),
        (
            lambda f: _file(f.parent, _entry("w", (9,), 0, 0), _entry("x", (9,), 0, 32)),
            "tensors 'w' and 'x' overlap",
        ),
        (lambda f: _file(f.parent, _entry("w", (999,), 0, 0)), "tensor 'w' ends there, found"),
        (lambda f: _file(f.parent, facts=_fact("k", 13, b""), count=1), "has unknown type 13"),
        (
            lambda f: _file(f.parent, facts=_fact("k", 8, struct.pack("<Q", 1) + b"\xff"), count=1),
            "is not UTF-8",
        ),
        (
            lambda f: _file(
                f.parent, facts=_fact("general.alignment", 4, struct.pack("<I", 0)), count=1
            ),
            "expected a general.alignment, found 0",
        ),
        (
            lambda f: _file(f.parent, facts=_fact("k", 9, struct.pack("<IQ", 8, 1 << 60)), count=1),
            "ends within its header",
        ),
    ],
)  # fmt: skip
def test_a_broken_header_is_refused(make: Callable[[Path], Any], said: str, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    make(file)
    with pytest.raises(CheckpointError, match=said):
        read_gguf(file)


# --- the tokenizer, and transformers -----------------------------------------------------------------


_ALPHABET = [chr(48 + n) for n in range(32)]
_TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": [*_ALPHABET, "AB", "ABC", "<s>", "</s>", "Ġ", "ĠA", "x", "y"],
    "tokenizer.ggml.token_type": [*[1] * 34, 3, 3, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["A B", "AB C", "Ġ A"],
    "tokenizer.ggml.bos_token_id": 34, "tokenizer.ggml.eos_token_id": 35,
    "tokenizer.chat_template": "{{ messages }}",
}  # fmt: skip


def test_without_transformers_the_tokenizer_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_source, "lacking", lambda extra: f"{extra} is not installed")
    file = model("llama", "F16").write(tmp_path / "m.gguf", _TOKENIZER)
    assert "its tokenizer is left out, since gguf is not installed" in ran("inspect", file).out


def test_a_tokenizer_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    broken = {**_TOKENIZER, "tokenizer.ggml.merges": ["A Z Q"]}
    file = model("llama", "F16").write(tmp_path / "m.gguf", broken)
    said = refused("dequant", file, tmp_path / "out")
    assert f"{file}: transformers makes no tokenizer of it: " in said


@pytest.mark.peer
@pytest.mark.parametrize("architecture", [one for one in ARCHITECTURES if one != "gpt-oss"])
def test_transformers_reads_the_same(architecture: str, tmp_path: Path) -> None:
    """Weights of the file, loaded by transformers, and of the folder; and ids of its tokenizer."""
    import transformers

    hf: Any = transformers
    made = model(architecture, "Q5_0")
    (tmp_path / "in").mkdir()
    facts = dict(_TOKENIZER)
    if architecture == "gemma3":  # of pieces with scores
        tokens = ["<unk>", *facts["tokenizer.ggml.tokens"][1:]]
        facts |= {
            "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": [0.0] * 40,
            "tokenizer.ggml.unknown_token_id": 0,
        }  # fmt: skip
    file = made.write(tmp_path / "in" / "m.gguf", facts)
    given = {"gguf_file": "m.gguf"}
    theirs = hf.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given)
    converted(file, tmp_path / "out")
    ours = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    wanted, found = theirs.to(torch.bfloat16).state_dict(), ours.state_dict()
    assert wanted.keys() == found.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
    known = (
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "rms_norm_eps",
    )
    assert [getattr(ours.config, k) for k in known] == pytest.approx(
        [getattr(theirs.config, k) for k in known]
    )
    first = hf.AutoTokenizer.from_pretrained(file.parent, **given)
    second = hf.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("ABCAB", "AB ABC 12", "</s>A", ""):
        assert first(text)["input_ids"] == second(text)["input_ids"]
