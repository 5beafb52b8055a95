"""Forms of checkpoints that rules on data must read: scales of every kind, packed INT4, stacks that
hold columns first, tied heads; and what is said where nothing can be proved."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import amx_rows
import gdn_models
import numpy as np
import pytest
from checkpoints import Model, Tensor, bf16_moe, copied, run_cli, write_json
from data_folders import OURS, floats, halves, home, lines, read_matrix, rules, store, validated
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from models import qwen3_moe

from qconvert.validation.workers import CHUNK
from qconvert.validators.reading.matrices import segment_runs

Array = np.ndarray[Any, Any]
Q = "model.layers.0.self_attn.q_proj"


# --- Scales ---------------------------------------------------------------------------------------


def e4m3(codes: Array) -> Array:
    """Codes as float64, by arithmetic on their fields."""
    wide = codes.astype(np.int32)
    exponent, mantissa = wide >> 3 & 15, wide & 7
    size = np.where(exponent == 0, mantissa / 512, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.where(wide >> 7, -size, size)


def one_fp8(folder: Path, codes: Array, scale: Tensor, name: str, how: dict[str, Any]) -> Path:
    """A model nobody knows with one FP8 matrix and whatever scale."""
    tensors = {
        f"{Q}.weight": Tensor("F8_E4M3", codes.shape, codes.tobytes()),
        f"{Q}.{name}": scale,
    }
    config = {"model_type": "toy", "quantization_config": {"quant_method": "fp8", **how}}
    return Model(config, tensors).write(folder, 1)


SHAPES = st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 9), st.integers(1, 9))


@settings(max_examples=60)
@given(
    shape=SHAPES,
    form=st.sampled_from(["block", "channel", "channel 2-D", "tensor", "scalar"]),
    dtype=st.sampled_from(["F32", "BF16", "U8", "F8_E8M0"]),
    seed=st.integers(0, 99),
)
def test_fp8_with_any_scale(
    tmp_path_factory: pytest.TempPathFactory,
    shape: tuple[int, int, int, int],
    form: str,
    dtype: str,
    seed: int,
) -> None:
    """Against one product an element."""
    height, width, high, wide = shape
    random = np.random.default_rng(seed)
    codes = random.integers(0, 0x7F, (height, width), np.uint8)
    grids: dict[str, tuple[int, ...]] = {
        "block": (-(-height // high), -(-width // wide)), "channel": (height,),
        "channel 2-D": (height, 1), "tensor": (1,), "scalar": (),
    }  # fmt: skip
    grid = grids[form]
    count = int(np.prod(grid))
    if dtype in ("U8", "F8_E8M0"):
        raw = random.integers(1, 255, count, np.uint8)
        numbers, data = 2.0 ** (raw.astype(np.float64) - 127), raw.tobytes()
    elif dtype == "BF16":
        cut = floats(halves(random.standard_normal(count)))
        numbers, data = cut.astype(np.float64), halves(cut).tobytes()
    else:
        single = random.standard_normal(count).astype(np.float32)
        numbers, data = single.astype(np.float64), single.tobytes()
    block = {"weight_block_size": [high, wide]} if form == "block" else {}
    how = {**block, **({"scale_fmt": "ue8m0"} if dtype == "U8" else {})}
    name = "weight_scale_inv" if form == "block" else "weight_scale"
    folder = one_fp8(tmp_path_factory.mktemp("fp8"), codes, Tensor(dtype, grid, data), name, how)
    found = read_matrix(folder, f"{Q}.weight")
    for row in range(height):
        for column in range(width):
            at = {
                "block": row // high * (-(-width // wide)) + column // wide,
                "tensor": 0,
                "scalar": 0,
            }
            value = e4m3(codes[row, column]) * numbers[at.get(form, row)]
            with np.errstate(over="ignore"):
                assert found[row, column] == np.float32(value)


@pytest.mark.parametrize(
    "block",
    [
        {"weight_block_size": [4, 4]},
        {"linear_fp8_config": {"weight_block_size": [4, 4]}},
        {"config_groups": {"a": {"weights": {"type": "float", "num_bits": 8, "strategy": "block",
                                             "block_structure": [4, 4]}}}},
    ],
)  # fmt: skip
def test_wherever_a_config_states_its_blocks(block: dict[str, Any], tmp_path: Path) -> None:
    codes = np.arange(64, dtype=np.uint8).reshape(8, 8)
    scale = np.array([[1, 2], [4, 8]], np.float32)
    held = Tensor("F32", (2, 2), scale.tobytes())
    folder = one_fp8(tmp_path, codes, held, "weight_scale", block)
    spread = scale.repeat(4, 0).repeat(4, 1)
    assert np.array_equal(read_matrix(folder, f"{Q}.weight"), e4m3(codes) * spread)


def test_a_form_nobody_knows_is_compared_as_bytes(tmp_path: Path) -> None:
    """U8 scales that nothing calls exponents: the same bytes are the same weights."""
    codes = np.arange(64, dtype=np.uint8).reshape(8, 8)
    scale = Tensor("U8", (2, 2), b"\x70\x71\x72\x73")
    how = {"weight_block_size": [4, 4]}
    source = one_fp8(tmp_path / "source", codes, scale, "weight_scale_inv", how)
    out = copied(source, tmp_path / "out")
    assert rules(validated(out, source)) == set()
    data = lines(out, f"{Q}.weight")
    data[1, 1] ^= 1
    store(out, f"{Q}.weight", data)
    (finding,) = [f for f in validated(out, source).findings if f.rule in OURS]
    assert (finding.rule, finding.where) == ("QC060", f"{Q}.weight")
    assert finding.message == "byte 9: expected 9 as in the source, found 8"


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    codes = np.arange(64, dtype=np.uint8).reshape(8, 8)
    scale = Tensor("U8", (2, 2), b"\x70\x71\x72\x73")
    source = one_fp8(
        tmp_path / "a", codes, scale, "weight_scale_inv", {"weight_block_size": [4, 4]}
    )
    tensors = {f"{Q}.weight": Tensor("BF16", (8, 8), bytes(range(128)))}
    out = Model({"model_type": "toy"}, tensors).write(tmp_path / "b", 1)
    report = validated(out, source)
    said = [text for text in report.not_checked if "not compared" in text]
    why = "its scale is U8, but no scale_fmt says that those are exponents"
    assert said == [f"1 tensor not compared; {Q}.weight: {why}"]
    assert not [text for text in report.proved if text.startswith("every weight is")]
    assert "QC060" not in rules(report)


# --- Layouts --------------------------------------------------------------------------------------


def test_packed_int4_first_code_lowest(tmp_path: Path) -> None:
    """Two words and two groups a row, worked out by hand: the word 0xF8765431 holds the codes 1, 3, 4,
    5, 6, 7, 8, 15, each 8 too many."""
    words = struct.pack("<4I", 0xF8765431, 0x88888888, 0x01234567, 0xFFFFFFFF)
    scale = halves(np.array([[0.5, 2], [1, 4]], np.float32)).tobytes()
    tensors = {
        f"{Q}.weight_packed": Tensor("I32", (2, 2), words),
        f"{Q}.weight_scale": Tensor("BF16", (2, 2), scale),
        f"{Q}.weight_shape": Tensor("I64", (2,), struct.pack("<2q", 2, 16)),
    }
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 8,
    }
    block = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": weights}}}
    config = {"model_type": "toy", "quantization_config": block}
    folder = Model(config, tensors).write(tmp_path, 1)
    assert read_matrix(folder, f"{Q}.weight_packed").tolist() == [
        [-3.5, -2.5, -2, -1.5, -1, -0.5, 0, 3.5] + [0] * 8,
        [-1, -2, -3, -4, -5, -6, -7, -8] + [28] * 8,
    ]


@pytest.mark.parametrize("turned", [True, False])
def test_stacks_that_hold_columns_first(turned: bool, tmp_path: Path) -> None:
    """Qwen3-VL's as published, and as transformers saves them."""
    hidden, width, experts = 6, 4, 2
    gate_up = gdn_models.numbers("gate_up", experts, 2 * width, hidden)
    down = gdn_models.numbers("down", experts, hidden, width)
    held = [stack.transpose(0, 2, 1) if turned else stack for stack in (gate_up, down)]
    at = "model.language_model.layers.0.mlp.experts"
    tensors = {
        f"{at}.gate_up_proj": gdn_models.bf16(held[0]),
        f"{at}.down_proj": gdn_models.bf16(held[1]),
    }
    text = {"hidden_size": hidden, "num_hidden_layers": 1, "num_experts": experts,
            "moe_intermediate_size": width}  # fmt: skip
    folder = Model({"model_type": "qwen3_vl_moe", "text_config": text}, tensors).write(tmp_path, 1)
    for expert in range(experts):
        wanted = {"gate_proj": gate_up[expert, :width], "up_proj": gate_up[expert, width:],
                  "down_proj": down[expert]}  # fmt: skip
        for role, values in wanted.items():
            name = f"{at}.{'down_proj' if role == 'down_proj' else 'gate_up_proj'}"
            cut = floats(halves(values.ravel())).reshape(values.shape)
            assert np.array_equal(read_matrix(folder, name, role, expert), cut)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_segments_of_any_layout(heads: int, ratio: int, keys: int, values: int) -> None:
    """Every row of a fused tensor belongs to one segment; groups hold each segment's share in turn."""
    sizes = (heads * keys, heads * keys, heads * ratio * values, heads * ratio * values)
    for groups in (g for g in range(1, heads + 1) if heads % g == 0):
        labels = [[(s, r) for r in range(size)] for s, size in enumerate(sizes)]
        fused = [
            label
            for group in range(groups)
            for rows_of in labels
            for label in rows_of[
                group * len(rows_of) // groups : (group + 1) * len(rows_of) // groups
            ]
        ]
        found = segment_runs(sizes, groups)
        taken = [[fused[i] for run in runs for i in range(*run)] for runs in found]
        assert taken == labels


def test_a_head_made_of_tied_embeddings(tmp_path: Path) -> None:
    """A stage's own head is compared with the embeddings it was made from."""
    model = bf16_moe(tie_word_embeddings=True)
    del model.tensors["lm_head.weight"]
    source = model.write(tmp_path / "source")
    head = "lm_head.weight"
    model.tensors[head] = model.tensors["model.embed_tokens.weight"]
    model.config["tie_word_embeddings"] = False
    out = model.write(tmp_path / "out")
    assert rules(validated(out, source)) == set()
    store(out, head, lines(out, head)[::-1])
    assert [f.where for f in validated(out, source).findings if f.rule == "QC060"] == [head]


def test_awkward_rows_as_w4a16(tmp_path: Path) -> None:
    """Denormals, ties, zeros, outliers and numbers up to 3e38: rounding brings none too far."""
    source = qwen3_moe(layers=1).write(tmp_path / "source")
    (tmp_path / "r.yaml").write_text("passes:\n- w4a16: {group_size: 128}\n")
    result = run_cli("run", tmp_path / "r.yaml", source, tmp_path / "out", "--jobs", "1")
    assert result.code == 0, result.err
    report = validated(tmp_path / "out", source)
    assert [f for f in report.findings if f.severity == "error" and f.rule in OURS] == []
    assert {f.rule for f in report.findings} <= {"QC068"}  # its scales are absurd indeed


@pytest.mark.big
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), freedom=st.sampled_from([1.5, 3, 8]))
def test_heavy_tails_as_w4a16(
    tmp_path_factory: pytest.TempPathFactory, seed: int, freedom: float
) -> None:
    """Student-t rows with outlier channels fit within the bound, and one step more does not."""
    folder = tmp_path_factory.mktemp("tails")
    model = bf16_moe(hidden_size=16, moe_intermediate_size=16)
    random = np.random.default_rng(seed)
    for name, value in model.tensors.items():
        shape = tuple(
            16 if size in (6, 8) and ".experts." in name else size for size in value.shape
        )
        values = random.standard_t(freedom, shape)
        if len(shape) == 2:
            values[:, 3] *= 20
        model.tensors[name] = Tensor("BF16", shape, amx_rows.bf16(values).tobytes())
    source = model.write(folder / "source")
    (folder / "r.yaml").write_text("passes:\n- w4a16: {group_size: 8}\n")
    result = run_cli("run", folder / "r.yaml", source, folder / "out", "--jobs", "1")
    assert result.code == 0, result.err
    out, name = folder / "out", "model.layers.1.mlp.experts.0.up_proj.weight_packed"
    assert rules(validated(out, source)) - {"QC068"} == set()
    data = lines(out, name)
    low = int(data[3, 1]) & 15
    data[3, 1] = int(data[3, 1]) + (1 if low < 15 else -1)
    store(out, name, data)
    wrong = lines(source, name.removesuffix("_packed"))
    # One step further is beyond half a step, but for a weight that lies between the two.
    step = floats(lines(out, name.replace("packed", "scale")))[3, 0]
    off = abs(floats(wrong)[3, 2] - (low + (1 if low < 15 else -1) - 8) * step)
    found = rules(validated(out, source)) - {"QC068"}  # heavy tails may be absurdly long
    bound = 0.5 + 7.5 * 2.0**-8
    assume(abs(off / step - bound) > 2.0**-10)  # at the bound itself its own rounding decides
    assert found == ({"QC060"} if off > bound * step else set())


# --- Values and shared scales ---------------------------------------------------------------------


def test_beyond_the_first_chunk(tmp_path: Path) -> None:
    """A NaN in the second chunk of a tensor is found where it is; zero rows are ordinary."""
    columns = 1024
    height = CHUNK // (2 * columns) + 8
    data = np.ones((height, columns), "<u2")
    data[3:5] = 0
    data[height - 2, 17] = 0x7FC0
    tensors = {"model.embed_tokens.weight": Tensor("BF16", data.shape, data.tobytes())}
    folder = Model({"model_type": "toy"}, tensors).write(tmp_path, 1)
    (finding,) = [f for f in validated(folder, None).findings if f.rule == "QC066"]
    assert f"row {height - 2}, column 17" in finding.message


@pytest.mark.parametrize(
    ("dtype", "broken", "sound"),
    [
        ("BF16", b"\x80\x7f", b"\x7f\x7f"), ("BF16", b"\x81\xff", b"\x7f\xff"),
        ("F16", b"\x00\x7c", b"\xff\x7b"), ("F16", b"\x01\xfe", b"\xff\xfb"),
        ("F32", b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f"),
        ("F64", b"\x00" * 6 + b"\xf0\xff", b"\xff" * 6 + b"\xef\xff"),
        ("F8_E5M2", b"\x7c", b"\x7b"), ("F8_E4M3", b"\xff", b"\xfe"),
    ],
)  # fmt: skip
def test_the_first_bits_that_are_no_number(
    dtype: str, broken: bytes, sound: bytes, tmp_path: Path
) -> None:
    for raw, wanted in ((broken, {"QC066"}), (sound, set())):
        data = bytes(3 * len(raw)) + raw
        where = tmp_path / str(bool(wanted))
        folder = Model({"model_type": "toy"}, {"a.norm": Tensor(dtype, (4,), data)}).write(where, 1)
        assert rules(validated(folder, None)) == wanted


def test_absurd_scales_are_a_warning_and_say_why(tmp_path: Path) -> None:
    codes = np.full((8, 8), 0x30, np.uint8)
    how = {"weight_block_size": [4, 4]}
    why = "; all are integers, like exponents (E8M0) that were stored as numbers"
    for numbers, at, reason in (
        ([70, 73, 74, 125], "1, 0", why),
        ([0.5, 0.5, 0.5, 74], "1, 1", ""),
    ):
        scale = Tensor("F32", (2, 2), np.array(numbers, np.float32).tobytes())
        folder = one_fp8(tmp_path / at, codes, scale, "weight_scale_inv", how)
        (finding,) = [f for f in validated(folder, None).findings if f.rule == "QC068"]
        assert finding.severity == "warning"
        text = f"scale [{at}]: a scale of 74 means weights far beyond any model's{reason}"
        assert finding.message == text


def test_zero_scales_beside_zero_codes_are_sound(tmp_path: Path) -> None:
    codes = np.full((8, 8), 0x30, np.uint8)
    codes[:4, 4:] = 0x80
    scale = np.array([[1, 0], [1, 1]], np.float32)
    how = {"weight_block_size": [4, 4]}
    held = Tensor("F32", (2, 2), scale.tobytes())
    folder = one_fp8(tmp_path, codes, held, "weight_scale_inv", how)
    assert rules(validated(folder, None)) == set()
    codes[2, 5] = 1
    store(folder, f"{Q}.weight", codes)
    (finding,) = [f for f in validated(folder, None).findings if f.rule == "QC068"]
    assert finding.severity == "error"
    assert finding.message.startswith("scale [0, 1]: expected a scale above 0 for codes")


def two_level(parameter: str, values: dict[str, float]) -> Model:
    """The modules of one fused group, each with a global scale."""
    model = bf16_moe()
    for module, value in values.items():
        name = f"model.layers.0.{module}.{parameter}"
        model.tensors[name] = Tensor("F32", (1,), struct.pack("<f", value))
    return model


GATE_UP = ("mlp.experts.1.gate_proj", "mlp.experts.1.up_proj")
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@pytest.mark.parametrize("modules", [GATE_UP, QKV], ids=["gate and up", "q, k and v"])
@pytest.mark.parametrize(
    ("parameter", "severity"),
    [
        ("weight_scale_2", "error"), ("weight_global_scale", "error"), ("weight_scale", "warning"),
        ("input_scale", "warning"), ("input_global_scale", "warning"),
    ],
)  # fmt: skip
def test_qc069_global_scales_that_differ(
    modules: tuple[str, ...], parameter: str, severity: str, tmp_path: Path
) -> None:
    same = dict.fromkeys(modules, 0.25)
    folder = two_level(parameter, same).write(tmp_path / "same")
    assert "QC069" not in rules(validated(folder, None))
    folder = two_level(parameter, {**same, modules[-1]: 0.5}).write(tmp_path / "other")
    (finding,) = [f for f in validated(folder, None).findings if f.rule == "QC069"]
    assert (finding.severity, finding.where) == (
        severity, f"model.layers.0.{modules[0]}.{parameter}",
    )  # fmt: skip
    last = modules[-1].rpartition(".")[2]
    assert f"{last} 0.5" in finding.message


def test_other_experts_scales_may_differ(tmp_path: Path) -> None:
    values = {
        "mlp.experts.0.gate_proj": 0.5,
        "mlp.experts.1.up_proj": 0.25,
        "mlp.experts.1.down_proj": 1,
    }
    folder = two_level("weight_scale_2", values).write(tmp_path)
    assert "QC069" not in rules(validated(folder, None))


# --- What is only read ----------------------------------------------------------------------------


def fused(tmp_path: Path, model: Model) -> tuple[Path, Path]:
    source = model.write(tmp_path / "source")
    result = run_cli("fuse", source, tmp_path / "out", "--for", "sglang", "--jobs", "1")
    assert result.code == 0, result.err
    return source, tmp_path / "out"


def test_without_a_source_the_order_is_only_read(tmp_path: Path) -> None:
    source, out = fused(tmp_path, gdn_models.model())
    claim = (
        "linear attention is fused in 1 group, says qconvert.json (--against SRC --level sample "
        "proves it)"
    )
    assert claim in validated(out, None).read
    assert claim in validated(out, source, "headers").read
    assert claim not in validated(out, source, "sample").read
    assert not [text for text in validated(source, None).read if "fused" in text]
    following = gdn_models.model("qwen3_next").write(tmp_path / "next")
    said = claim.replace("1 group, says qconvert.json", "4 groups, by the convention of qwen3_next")
    assert validated(following, None).read == [said]


def test_rows_that_are_alike_prove_no_order(tmp_path: Path) -> None:
    model = gdn_models.model()
    for name, value in model.tensors.items():
        if "in_proj_b." in name or "in_proj_a." in name:
            row = value.data[: len(value.data) // value.shape[0]]
            model.tensors[name] = Tensor(value.dtype, value.shape, row * value.shape[0])
    source, out = fused(tmp_path, model)
    report = validated(out, source)
    assert rules(report) == set()
    alike = [text for text in report.read if "so similar" in text]
    # b's rows are one another's likes, and a's: swapped they would be seen, in ranks they would not.
    assert [text for text in alike if "in_proj_ba" not in text] == []
    assert alike == []  # b's rows differ from a's, so every order but the right one shows
    for name, value in model.tensors.items():
        if "in_proj_b." in name:
            model.tensors[name.replace("_b.", "_a.")] = value
    source, out = fused(tmp_path / "more", model)
    report = validated(out, source)
    assert rules(report) == set()
    alike = [text for text in report.read if "so similar" in text]
    assert len(alike) == 3
    assert all("in_proj_ba" in text and "would look the same" in text for text in alike)


def test_nothing_says_how_a_source_is_fused(tmp_path: Path) -> None:
    """A fused Qwen3.5 repo of another tool: its fused tensors are compared as bytes."""
    _, out = fused(tmp_path, gdn_models.model())
    for name in ("qconvert.json", "qconvert.receipt.jsonl"):
        (out / name).unlink()
    other = copied(out, tmp_path / "other")
    report = validated(other, out)
    assert rules(report) == set()
    assert any("no valid gdn_groups" in text for text in report.not_checked)
    assert any(text.startswith("linear-attention rows are") for text in report.not_checked)


def test_a_source_of_other_sizes(tmp_path: Path) -> None:
    source, out = fused(tmp_path, gdn_models.model())
    config = gdn_models.model().config
    config["text_config"]["linear_num_value_heads"] = 4
    write_json(source / "config.json", config)
    report = validated(out, source)
    assert any("linear attention of other sizes" in text for text in report.not_checked)


@pytest.mark.big
def test_experts_for_a_cpu_kernel_are_others_work(tmp_path: Path) -> None:
    source = qwen3_moe(layers=1).write(tmp_path / "source")
    words = ("--method", "int4", "--numa", "1", "--jobs", "1")
    assert run_cli("amx", source, tmp_path / "out", *words).code == 0
    report = validated(tmp_path / "out", source)
    assert rules(report) == set()
    said = " ".join([*report.proved, *report.not_checked])
    assert "every weight is the source's" not in said
    assert "no tensor holds NaN" not in said
    assert home(tmp_path / "out", "blk.0.ffn_up_exps.0.numa.0.weight")
