"""What lies beside the weights against the source's: config.json, quantization blocks, side files; and
the shapes of packed weights. With no receipt or manifest to help."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gdn_models
import pytest
from broken_repos import change, edit_config, overwrite, packed_moe
from checkpoints import Model, Tensor, bf16_moe, copied, edit_json, fp8_moe, ran, run_cli
from data_folders import CONVERSIONS, Made, maker, validated
from models import qwen3_moe
from sampled import sampled

from qconvert import api
from qconvert.validation.findings import Finding

Edit = Callable[[dict[str, Any]], object]
KEPT = ("QC032", "QC083", "QC084", "QC085", "QC086")
SETTINGS = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "eos_token_id": 3,
    "transformers_version": "4.57.1", "rms_norm_eps": 1e-6, "rope_theta": 1e7, "norm_topk_prob": True,
    "initializer_range": 0.02, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "rope_scaling": None, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return maker(tmp_path_factory.mktemp("made"))


def found(out: Path, source: Path, level: str = "headers") -> list[Finding]:
    return [f for f in validated(out, source, level).findings if f.rule in KEPT]


def said(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(f.rule, f.severity, f.message) for f in findings]


def unsigned(folder: Path) -> Path:
    for name in ("qconvert.json", "qconvert.receipt.jsonl"):
        (folder / name).unlink()
    return folder


# --- Sound conversions ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", sampled(sorted(CONVERSIONS)))
def test_conversions_keep_what_the_source_says(name: str, made: Made, tmp_path: Path) -> None:
    """With their manifest and, as by another tool, without."""
    source, out = made(name)
    assert found(out, source, "full") == []
    bare = copied(out, tmp_path / "bare")
    for file in ("qconvert.json", "qconvert.receipt.jsonl"):
        (bare / file).unlink()
    assert found(bare, source) == []


@pytest.mark.parametrize("to", ["next", "text"])
def test_another_class_of_the_model(to: str, tmp_path: Path) -> None:
    """All settings a published config has, through the pass that rewrites them."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 10]}
    if to == "next":
        model = gdn_models.model()
        model.config["text_config"] |= SETTINGS | {"rope_parameters": rope}
        del model.config["text_config"]["rope_theta"]
        model.config |= {
            "image_token_id": 5,
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        }
        model.side_files |= {"preprocessor_config.json": b"{}", "tokenizer.json": b"{}"}
        passes = "- fuse: {consumer: qwen3-next}\n- as_class: {to: qwen3_next}\n"
    else:
        model = gdn_models.model("qwen3_next")
        model.config |= SETTINGS | {"decoder_sparse_step": 1, "mlp_only_layers": []}
        passes = "- unfuse\n- as_class: {to: qwen3_5_text}\n"
    source = model.write(tmp_path / "source")
    (tmp_path / "r.yaml").write_text(f"passes:\n{passes}")
    out = tmp_path / "out"
    ran("run", tmp_path / "r.yaml", source, out, "--jobs", "1")
    assert found(out, source, "full") == []
    unsigned(out)
    assert found(out, source) == []
    edit_json(
        out / "config.json", lambda config: config.update(num_experts_per_tok=1, eos_token_id=4)
    )
    assert {(f.rule, f.severity, f.message) for f in found(out, source)} == {
        ("QC083", "error", "num_experts_per_tok is 1, the source's is 2"),
        ("QC083", "error", "eos_token_id is 4, the source's is 3"),
    }


def test_drafts_that_were_dropped_are_not_counted(tmp_path: Path) -> None:
    source = gdn_models.model(scale="F32").write(tmp_path / "source")
    (tmp_path / "r.yaml").write_text("passes:\n- drop: {what: mtp}\n- dequant\n")
    out = tmp_path / "out"
    assert run_cli("run", tmp_path / "r.yaml", source, out, "--jobs", "1").code == 0
    assert found(out, source) == []
    # A count of 0 beside draft layers, and another count, are faults.
    kept = copied(source, tmp_path / "kept")
    edit_json(kept / "config.json", lambda c: c["text_config"].update(mtp_num_hidden_layers=0))
    key = "text_config.mtp_num_hidden_layers"
    assert said(found(kept, source)) == [("QC083", "error", f"{key} is 0, the source's is 1")]
    # Where neither has any, a count of 0 is right, and said.
    none = copied(out, tmp_path / "none")
    unsigned(none)
    edit_json(none / "config.json", lambda c: c["text_config"].update(mtp_num_hidden_layers=1))
    unsigned(out)
    report = api.validate(out, none)
    assert "QC083" not in {finding.rule for finding in report.findings}
    assert f"{key} is 0, and the source's 1: neither has such layers" in report.read


def test_stages_of_a_tied_model_and_joined_again(tmp_path: Path) -> None:
    model = bf16_moe(tie_word_embeddings=True)
    del model.tensors["lm_head.weight"]
    source = model.write(tmp_path / "source")
    ran("split", source, tmp_path / "s", "--pp", "1,1", "--for", "sglang", "--jobs", "1")
    stages = sorted((tmp_path / "s").glob("stage-*"))
    flags = [json.loads((s / "config.json").read_bytes())["tie_word_embeddings"] for s in stages]
    assert flags == [True, False]
    for stage in stages:
        assert found(stage, source, "full") == []
    joined = tmp_path / "joined"
    ran("join", tmp_path / "s", joined, "--jobs", "1")
    assert validated(joined, tmp_path / "s").errors == 0
    assert found(joined, source) == []
    # It was made from the stages, and its identity says so; so it is compared no further.
    report = validated(joined, source)
    assert {f.rule for f in report.findings} == {"QC031"}
    assert "a joined folder was read from its stages" in report.findings[0].message
    assert "every weight is the source's within its format's rounding" in report.proved
    assert any("QC031" in text and "config.json" in text for text in report.not_checked)


def test_experts_for_cpu_kernels(tmp_path: Path) -> None:
    source = qwen3_moe(layers=1).write(tmp_path / "source")
    out = tmp_path / "cpu"
    ran("kt", source, "--cpu-out", out, "--cpu", "int4", "--numa", "1", "--jobs", "1")
    assert found(out, source) == []
    (out / "qconvert.receipt.jsonl").unlink()
    assert found(out, source) == []
    edit_json(out / "config.json", lambda config: config.update(hidden_act="gelu"))
    (finding,) = found(out, source)
    assert (finding.rule, finding.severity, finding.where) == ("QC083", "error", "config.json")


# --- Settings -------------------------------------------------------------------------------------


def put(**settings: Any) -> Edit:
    return lambda config: config["text_config"].update(settings)


def take(key: str) -> Edit:
    return lambda config: config["text_config"].pop(key)


def at_root(**settings: Any) -> Edit:
    return lambda config: config.update(settings)


WRONG: list[tuple[Edit, str, str]] = [
    (put(rope_theta=1e4), "error", "text_config.rope_theta is 10000.0, the source's is 10000000.0"),
    (put(rope_parameters={"rope_theta": 1e4}), "error", "text_config.rope_theta is"),
    (put(rope_parameters={"rope_type": "linear", "factor": 8}), "warning", "rope_parameters.factor (8)"),
    (put(num_attention_heads=7), "error", "text_config.num_attention_heads is 7, the source's is 4"),
    (put(num_experts_per_tok=1), "error", "num_experts_per_tok is 1, the source's is 2"),
    (put(norm_topk_prob=False), "error", "norm_topk_prob is False, the source's is True"),
    (put(hidden_act="gelu"), "error", "hidden_act is 'gelu', the source's is 'silu'"),
    (take("rms_norm_eps"), "error", "text_config.rms_norm_eps is missing, the source's is 1e-06"),
    (put(rms_norm_eps=10.0), "error", "rms_norm_eps is 10.0"),
    (put(eos_token_id=[3, 4]), "error", "eos_token_id is [3, 4], the source's is 3"),
    (put(layer_types=["full_attention"] * 4), "error", "layer_types is ['full_attention', "),
    (at_root(architectures=["LlamaForCausalLM"]), "error", "architectures is ['LlamaForCausalLM']"),
    (at_root(vision_config={"depth": 0, "patch_size": 7}), "warning", "vision_config.patch_size (7)"),
    (at_root(model_type="qwen3_moe"), "error", "model_type is 'qwen3_moe', the source's is"),
    (put(initializer_range=1.0), "warning", "text_config.initializer_range is 1.0"),
    (put(sliding_window=128), "warning", "settings that the source does not: text_config.sliding_"),
    (put(tie_word_embeddings=True), "error", "is true, but the source has a separate head"),
    (at_root(tie_word_embeddings=True), "error", "is true, but the source has a separate head"),
]  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = gdn_models.model()
    model.config["text_config"] |= SETTINGS
    model.config["architectures"] = SETTINGS["architectures"]
    return model.write(tmp_path_factory.mktemp("published") / "source")


@pytest.mark.parametrize(("edit", "severity", "text"), WRONG, ids=[text for _, _, text in WRONG])
def test_settings_that_are_not_the_sources(
    edit: Edit, severity: str, text: str, published: Path, tmp_path: Path
) -> None:
    out = edit_config(copied(published, tmp_path / "out"), edit)
    findings = found(out, published)
    assert {(f.rule, f.where) for f in findings} == {("QC083", "config.json")}
    assert findings[0].severity == severity
    assert text in findings[0].message


def rope_moved(config: dict[str, Any]) -> None:
    """As transformers 5 writes it."""
    text = config["text_config"]
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": text.pop("rope_theta")}


SAME: list[Edit] = [
    rope_moved,
    put(rope_parameters={"rope_type": "default", "rope_theta": 1e7}),
    take("rope_scaling"),
    put(transformers_version="5.17.0", torch_dtype="bfloat16"),
    take("dtype"),
    at_root(_name_or_path="/somewhere"),
]


@pytest.mark.parametrize("edit", SAME)
def test_settings_said_otherwise(edit: Edit, published: Path, tmp_path: Path) -> None:
    out = edit_config(copied(published, tmp_path / "out"), edit)
    assert [f for f in found(out, published) if f.severity == "error"] == []
    if edit is not SAME[2]:  # null and nothing may be two things
        assert found(out, published) == []


def test_many_differences_are_cut_short(published: Path, tmp_path: Path) -> None:
    more = {f"option_{number}": number for number in range(40)}
    source = edit_config(copied(published, tmp_path / "a"), put(**more))
    findings = found(published, source)
    assert len(findings) == 21
    assert findings[-1].message == "20 more settings differ from the source's"
    (finding,) = found(source, published)
    assert finding.message.endswith("text_config.option_19 (19) and 20 more")


def test_an_untied_model_cannot_lose_its_head(tmp_path: Path) -> None:
    source = bf16_moe().write(tmp_path / "source")
    out = copied(source, tmp_path / "out")
    change(out, lambda tensors: tensors.pop("lm_head.weight"))
    edit_config(out, at_root(tie_word_embeddings=True))
    report = validated(out, source, "sample")
    errors = {(f.rule, f.where) for f in report.findings if f.severity == "error"}
    assert errors == {("QC062", "lm_head.weight"), ("QC083", "config.json")}


def test_a_tied_model_cannot_be_untied_without_a_head(tmp_path: Path) -> None:
    model = bf16_moe(tie_word_embeddings=True)
    del model.tensors["lm_head.weight"]
    source = model.write(tmp_path / "source")
    out = edit_config(copied(source, tmp_path / "out"), at_root(tie_word_embeddings=False))
    (finding,) = found(out, source)
    assert "tie_word_embeddings is not true as in the source" in finding.message


def test_flags_that_contradict_each_other_in_the_source_too(
    published: Path, tmp_path: Path
) -> None:
    """As transformers saves some multi-modal models: the root's is another than text_config's."""
    source = edit_config(copied(published, tmp_path / "a"), put(tie_word_embeddings=False))
    edit_config(source, at_root(tie_word_embeddings=True))
    assert found(copied(source, tmp_path / "b"), source) == []
    assert [f.severity for f in found(source, published)] == ["error"]


# --- Quantization blocks --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("scale_fmt", "ue8m0", "scale_fmt is 'ue8m0', the source's is None"),
        ("fmt", "e5m2", "fmt is 'e5m2', the source's is 'e4m3'"),
        ("activation_scheme", "static", "activation_scheme is 'static', the source's is 'dynamic'"),
        ("weight_block_size", [8, 4], "weight_block_size is [8, 4], the source's is [4, 4]"),
        ("weight_block_size", None, "weight_block_size is None, the source's is [4, 4]"),
    ],
)
def test_blocks_of_kept_fp8_weights(key: str, value: Any, text: str, tmp_path: Path) -> None:
    source = fp8_moe().write(tmp_path / "source")
    block = {key: value}
    out = edit_config(
        copied(source, tmp_path / "out"), lambda c: c["quantization_config"].update(block)
    )
    where = "config.json: quantization_config: "
    assert said(found(out, source)) == [("QC084", "error", where + text)]


def test_what_is_said_by_default_is_no_change(tmp_path: Path) -> None:
    source = fp8_moe().write(tmp_path / "source")
    out = edit_config(
        copied(source, tmp_path / "out"), lambda c: c["quantization_config"].pop("fmt")
    )
    assert found(out, source) == []


def test_blocks_inside_a_block(made: Made, tmp_path: Path) -> None:
    """A scale_fmt that experts in INT4 took with them is the source's, or it is a fault."""
    source = fp8_moe().write(tmp_path / "source")
    inner = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [4, 4]}
    out = copied(source, tmp_path / "out")
    block = {"quant_method": "compressed-tensors", "linear_fp8_config": inner}
    edit_config(out, at_root(quantization_config=block))
    (message,) = (f.message for f in found(out, source))
    where = "config.json: quantization_config.linear_fp8_config"
    assert message == f"{where}: scale_fmt is 'ue8m0', the source's is None"


# --- Side files -----------------------------------------------------------------------------------


def test_side_files_that_are_not_the_sources(tmp_path: Path) -> None:
    model = bf16_moe()
    model.side_files |= {"LICENSE": b"MIT", "README.md": b"ours", "vocab.json": b'{"a": 1, "b": 2}'}
    source = model.write(tmp_path / "source")
    out = copied(source, tmp_path / "out")
    (out / "README.md").write_text("theirs")
    (out / "vocab.json").write_text('{"b": 2,\n "a": 1}')
    assert found(out, source) == []
    (out / "tokenizer.json").write_bytes(b'{"version": "1.1"}\n')  # as long as it was
    (out / "chat_template.jinja").write_text("{{ m }}")
    (out / "generation_config.json").write_text('{"do_sample": false}')
    (out / "LICENSE").write_text("GPL")
    assert {(f.rule, f.severity, f.where) for f in found(out, source)} == {
        ("QC085", "error", "tokenizer.json"),
        ("QC085", "error", "chat_template.jinja"),
        ("QC085", "warning", "generation_config.json"),
        ("QC085", "warning", "LICENSE"),
    }


def test_side_files_that_are_missing(tmp_path: Path) -> None:
    model = bf16_moe()
    model.side_files |= {f"figures/{number:02}.txt": b"" for number in range(10)}
    source = model.write(tmp_path / "source")
    out = copied(source, tmp_path / "out")
    for file in (*out.glob("figures/*"), out / "tokenizer.json", out / "generation_config.json"):
        file.unlink()
    findings = found(out, source)
    assert [(f.rule, f.severity, f.where) for f in findings] == [
        ("QC032", "warning", "generation_config.json"),
        ("QC032", "warning", "tokenizer.json"),
        ("QC032", "warning", "figures/00.txt"),
    ]
    assert findings[-1].message.endswith("figures/07.txt and 2 more")


def test_side_files_that_lead_nowhere(tmp_path: Path) -> None:
    source = bf16_moe().write(tmp_path / "source")
    out = copied(source, tmp_path / "out")
    (out / "tokenizer.json").unlink()
    (out / "tokenizer.json").symlink_to("blob")
    for one, other in ((out, source), (source, out)):
        (finding,) = found(one, other)
        assert (finding.rule, finding.severity, finding.where) == (
            "QC085",
            "error",
            "tokenizer.json",
        )
        missing = f"{out / 'tokenizer.json'}: cannot be read: No such file or directory"
        assert finding.message == f"cannot be compared with the source's: {missing}"


def test_a_text_model_has_no_use_for_processors(tmp_path: Path) -> None:
    model = gdn_models.model()
    model.side_files["preprocessor_config.json"] = b"{}"
    source = model.write(tmp_path / "source")
    text = gdn_models.model("qwen3_5_moe_text").write(tmp_path / "text")
    assert found(text, source) == []


# --- Shapes of packed weights ---------------------------------------------------------------------

UP = "model.layers.1.mlp.experts.0.up_proj.weight_shape"  # of [16, 8]


def shapes(folder: Path, level: str) -> Iterator[tuple[str, str]]:
    for finding in validated(folder, None, level).findings:
        if finding.rule == "QC086":
            yield finding.where, finding.message


@pytest.mark.parametrize(
    ("rows", "columns"), [(8, 16), (0, 0), (16, 7), (15, 8), (16, 2**40), (-1, 8)]
)
@pytest.mark.parametrize("level", ["sample", "full"])
def test_shapes_that_are_not_those_of_weights(
    rows: int, columns: int, level: str, tmp_path: Path
) -> None:
    source = packed_moe().write(tmp_path / "source")
    assert list(shapes(source, level)) == []
    out = overwrite(copied(source, tmp_path / "out"), UP, struct.pack("<2q", rows, columns))
    message = f"expected [16, 8] as packed, found [{rows}, {columns}]"
    assert list(shapes(out, level)) == [(UP, message)]
    assert list(shapes(out, "headers")) == []


@pytest.mark.parametrize(("columns", "sound"), [(13, True), (16, True), (8, False), (17, False)])
def test_a_last_word_that_is_part_full(columns: int, sound: bool, tmp_path: Path) -> None:
    """A scale a row: K need not be whole words, only their number must be right."""
    q = "model.layers.0.self_attn.q_proj"
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
    block = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": weights}}}
    tensors = {
        f"{q}.weight_packed": Tensor("I32", (2, 2), bytes(range(16))),
        f"{q}.weight_scale": Tensor("BF16", (2, 1), b"\x80\x3f" * 2),
        f"{q}.weight_shape": Tensor("I32", (2,), struct.pack("<2i", 2, columns)),
    }
    folder = Model({"model_type": "toy", "quantization_config": block}, tensors).write(tmp_path, 1)
    assert [where for where, _ in shapes(folder, "full")] == (
        [] if sound else [f"{q}.weight_shape"]
    )


def test_packed_by_a_conversion(made: Made) -> None:
    for name in ("w4a16", "w4a16 of fp8"):
        report = validated(made(name)[1], None)
        assert "packed weights have the shape that is stored with them" in report.proved
        assert [f for f in report.findings if f.rule == "QC086"] == []


# --- Configs that say too little ------------------------------------------------------------------


@pytest.mark.parametrize("key", ["linear_value_head_dim", "linear_num_key_heads"])
@pytest.mark.parametrize("value", [None, 0, -8])
@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_next"])
def test_linear_attention_of_no_known_size(
    key: str, value: int | None, kind: str, tmp_path: Path
) -> None:
    """Either side's rows cannot be told apart then; a report is made, whatever else it finds."""
    source = gdn_models.model(kind).write(tmp_path / "source")
    out = copied(source, tmp_path / "out")

    def edit(config: dict[str, Any]) -> None:
        config.get("text_config", config)[key] = value

    edit_config(out, edit)
    for one, other in ((out, source), (source, out)):
        report = validated(one, other)
        assert report.errors, "the config differs"
        assert any("not compared" in text for text in report.not_checked)
