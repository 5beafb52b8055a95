"""mtp extract, graft and drop: what is in the folders, what is stated of them, and what is refused.

sglang's own draft classes load them in tests/loaders/test_extracted_drafts.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import edit_json, ran, read_tensors, run_cli
from loaders.published import published
from sampled import sampled

from qconvert import api

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "deepseek_v3", "glm4_moe")


def written(tmp_path: Path, family: str, *, fp8: bool = False) -> Path:
    folder = tmp_path / f"{family} {'fp8' if fp8 else 'bf16'}"
    return published(family, fp8=fp8, experts=2, inner=128).write(folder)


def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    return found


def made(*words: str | Path) -> Path:
    """What a command makes: the last word."""
    ran(*words, "--jobs", "1")
    return Path(words[-1])


def refusal(*words: str | Path) -> str:
    done = run_cli(*words, "--jobs", "1")
    assert done.code == 1, (done.out, done.err)
    return done.err


def proved(out: Path, *words: str | Path) -> None:
    report = run_cli("validate", out, *words, "--level", "full", "--jobs", "1")
    assert "0 errors, 0 warnings" in report.out, report.out


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", sampled(FAMILIES))
def test_a_draft_leaves_and_comes_back(family: str, fp8: bool, tmp_path: Path) -> None:
    source = written(tmp_path, family, fp8=fp8)
    draft = made("mtp", "extract", source, tmp_path / "draft")
    bare = made("mtp", "drop", source, tmp_path / "bare")
    proved(draft, "--against", source)
    proved(bare, "--against", source)
    held, left, all_of = read_tensors(draft), read_tensors(bare), read_tensors(source)
    ends = {name for name in held if name in left}
    own = family in ("deepseek_v3", "glm4_moe")  # whose draft has embeddings and a head of its own
    assert len(ends) == (0 if own else 2)
    assert {**held, **left} == all_of
    assert api.open_checkpoint(bare).role_index.dims.mtp_layers == 0
    assert config(draft) == config(source)
    # From the folder of the draft, and from the original model.
    for beside in (draft, source):
        back = made("mtp", "graft", bare, beside, tmp_path / f"back from {beside.name}")
        assert read_tensors(back) == all_of
        assert config(back) == config(source)
        proved(back, "--against", bare, "--draft", beside)
        assert run_cli("diff", source, back).code == 0


def test_of_a_draft_that_is_not_quantized_no_block_is_left(tmp_path: Path) -> None:
    source = written(tmp_path, "qwen3_5_moe_text")
    quantized = made("w4a16", "--rtn", "--group-size", "32", source, tmp_path / "packed")
    assert "quantization_config" in config(quantized)
    draft = made("mtp", "extract", quantized, tmp_path / "draft")
    packed = any(name.endswith("_packed") for name in read_tensors(draft))
    assert ("quantization_config" in config(draft)) == packed
    bare = made("mtp", "extract", source, tmp_path / "plain")
    assert "quantization_config" not in config(bare)


def test_a_damaged_draft_is_found(tmp_path: Path) -> None:
    """Its layers, and what it shares with its model, are required; the model's layers are another's."""
    source = written(tmp_path, "qwen3_5")
    draft = made("mtp", "extract", source, tmp_path / "draft")
    edit_json(draft / "config.json", lambda c: c["text_config"].update(mtp_num_hidden_layers=2))
    report = run_cli("validate", draft)
    assert report.code == 3
    assert "QC013" in report.out
    assert "mtp.layers.1" in report.out
    manifest = draft / "qconvert.json"
    edit_json(manifest, lambda m: m.pop("draft"))
    assert "model.language_model.layers.0" in run_cli("validate", draft).out
    edit_json(manifest, lambda m: m.update(draft={"shared": "lm_head.weight"}))
    assert "expected 'draft' to be an object" in run_cli("validate", draft).out


# What a model quantized without its draft says of the draft's layers.
LISTED: dict[tuple[str, ...], tuple[str, str]] = {
    ("w4a16", "--rtn", "--group-size", "32"): ("ignore", r"re:model\.layers\.3\..*"),
    ("nvfp4", "--dialect", "modelopt"): ("ignore", "model.layers.3.*"),
    ("nvfp4", "--dialect", "compressed-tensors"): ("ignore", r"re:model\.layers\.3\..*"),
}


@pytest.mark.parametrize("command", LISTED, ids=lambda words: " ".join(words[:3]))
def test_a_plain_draft_in_a_quantized_model(command: tuple[str, ...], tmp_path: Path) -> None:
    """Its layers are added to the list of what is not quantized, and sglang's class loads them."""
    source = written(tmp_path, "glm4_moe")
    bare = made("mtp", "drop", source, tmp_path / "bare")
    packed = made(command[0], *command[1:], bare, tmp_path / "packed")
    back = made("mtp", "graft", packed, source, tmp_path / "back")
    key, entry = LISTED[command]
    assert entry not in config(packed)["quantization_config"][key]
    assert entry in config(back)["quantization_config"][key]
    beside = back / "hf_quant_config.json"
    if beside.exists():
        stated = json.loads(beside.read_bytes())["quantization"]
        assert entry in stated["exclude_modules"]
    proved(back, "--against", packed, "--draft", source, "--for", "sglang==0.5.23")


def test_encodings_that_do_not_fit(tmp_path: Path) -> None:
    source, fp8 = written(tmp_path, "glm4_moe"), written(tmp_path, "glm4_moe", fp8=True)
    bare = made("mtp", "drop", source, tmp_path / "bare")
    out = tmp_path / "out"
    said = refusal("mtp", "graft", bare, fp8, out)
    assert "quantized as its own config states (fp8), and the model's config states none" in said
    packed = made("w4a16", "--rtn", "--group-size", "32", bare, tmp_path / "packed")
    assert "the model's config states compressed-tensors" in refusal(
        "mtp", "graft", packed, fp8, out
    )
    # As the message says: the draft alone, then dequantized.
    draft = made("mtp", "extract", fp8, tmp_path / "draft")
    plain = made("dequant", draft, tmp_path / "draft in bf16")
    back = made("mtp", "graft", packed, plain, out)
    proved(back, "--against", packed, "--draft", plain)
    edit_json(packed / "config.json", lambda c: c["quantization_config"].update(quant_method="hqq"))
    said = refusal("mtp", "graft", packed, plain, tmp_path / "no")
    assert "how that method lists such modules is not known here" in said


def test_models_that_do_not_fit(tmp_path: Path) -> None:
    source, out = written(tmp_path, "qwen3_5"), tmp_path / "out"
    bare = made("mtp", "drop", source, tmp_path / "bare")
    assert "is of a draft already; drop that one first" in refusal(
        "mtp", "graft", source, source, out
    )
    assert "no tensor is known as one of a draft" in refusal("mtp", "graft", bare, bare, out)
    assert "no tensor is known as one of a draft" in refusal("mtp", "extract", bare, out)
    assert "config.json counts none: there is nothing to drop" in refusal("mtp", "drop", bare, out)
    edit_json(bare / "config.json", lambda c: c["text_config"].update(mtp_num_hidden_layers=1))
    true = made("mtp", "drop", bare, tmp_path / "true")  # a count alone is dropped, too
    assert (
        json.loads((true / "config.json").read_text())["text_config"]["mtp_num_hidden_layers"] == 0
    )
    other = written(tmp_path, "deepseek_v3")
    assert "found one for deepseek_v3" in refusal("mtp", "graft", bare, other, out)
    edit_json(source / "config.json", lambda c: c["text_config"].update(num_attention_heads=8))
    said = refusal("mtp", "graft", bare, source, out)
    assert "num_attention_heads is 8, the model's is 4" in said
    draft = made("mtp", "extract", other, tmp_path / "draft")
    assert "the folder holds a draft alone" in refusal("mtp", "drop", draft, out)
    assert not out.exists()


def test_a_part_of_a_draft_is_refused(tmp_path: Path) -> None:
    """Also where all that is said of it is what is said of the folder that it comes from."""
    model = published("qwen3_5", inner=128)
    bare = made("mtp", "drop", model.write(tmp_path / "source"), tmp_path / "bare")
    del model.tensors["mtp.layers.0.mlp.down_proj.weight"]
    said = refusal("mtp", "graft", bare, model.write(tmp_path / "part"), tmp_path / "out")
    assert "mtp.layers.0.mlp.down_proj.weight" in said


def test_without_the_drafts_folder_a_graft_is_named(tmp_path: Path) -> None:
    source = written(tmp_path, "qwen3_5")
    bare = made("mtp", "drop", source, tmp_path / "bare")
    back = made("mtp", "graft", bare, source, tmp_path / "back")
    report = run_cli("validate", back, "--against", bare)
    assert report.code == 3
    assert "A draft was grafted to it: give --draft DRAFT as well" in report.out


def test_qwen3_next_assumes_a_draft(tmp_path: Path) -> None:
    """Its published config does not state one."""
    source = written(tmp_path, "qwen3_next")
    edit_json(source / "config.json", lambda c: c.pop("num_nextn_predict_layers"))
    bare = made("mtp", "drop", source, tmp_path / "bare")
    assert config(bare)["mtp_num_hidden_layers"] == 0
    proved(bare, "--against", source)
    assert config(made("mtp", "graft", bare, source, tmp_path / "back")) == config(source)


def test_dry_runs_say_what_would_be_made(tmp_path: Path) -> None:
    source = written(tmp_path, "glm4_moe")
    bare = made("mtp", "drop", source, tmp_path / "bare")
    for words in (("extract", source), ("graft", bare, source)):
        done = ran("mtp", *words, tmp_path / "out", "--dry-run", "--json", "--jobs", "1")
        assert json.loads(done.out)["fingerprint"]
    assert not (tmp_path / "out").exists()


def test_a_card_says_how_a_draft_is_served(tmp_path: Path) -> None:
    source = written(tmp_path, "glm4_moe")
    draft = made("mtp", "extract", source, tmp_path / "draft")
    text = (draft / "README.md").read_text()
    assert "--speculative-draft-model-path REPO" in text
    assert "library_name" not in text


def test_the_launch_line_of_a_pair_says_how_it_drafts(tmp_path: Path) -> None:
    """sglang-kt reads a draft's experts from the GPU side, which has none with `--mtp drop`."""
    source = written(tmp_path, "glm4_moe")
    bare = made("mtp", "drop", source, tmp_path / "bare")
    line = "draft layers: --speculative-algorithm NEXTN drafts with them"
    words = ("--cpu", "int8", "--numa", "1", "--jobs", "1")
    both = ("--gpu", "w4a16", "--gpu-out")
    for name, model, more, says in (
        ("whole", source, (), True),
        ("bare", bare, (), False),
        ("kept", source, (*both, tmp_path / "gpu kept"), True),
        ("dropped", source, (*both, tmp_path / "gpu dropped", "--mtp", "drop"), False),
    ):
        done = ran("kt", model, "--cpu-out", tmp_path / f"cpu {name}", *words, *more)
        assert (line in done.out) is says, (name, done.out)
