"""Text models of multi-modal classes, tiny: the folder loads as the class that its config names, no key
is missing or unexpected, its logits are those of the whole model, and validate proves every byte.

`QCONVERT_ALL=1 pytest -m peer tests/families/test_text_only.py` tries all, else one in three.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import headers
import pytest
import torch
from checkpoints import edit_json, ran, read_tensors, refused, run_cli

from families.classes import config, model_types
from families.loading import loaded, logits
from families.tiny import saved

pytestmark = pytest.mark.peer

# The class of each text model.
CLASSES = {
    "qwen3_5": "Qwen3_5ForCausalLM", "gemma3": "Gemma3ForCausalLM", "qwen3_vl": "Qwen3ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM", "mistral3": "MistralForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM", "qwen3_vl_moe": "Qwen3MoeForCausalLM",
    "internvl": "Qwen2ForCausalLM", "qwen2_vl": "Qwen2ForCausalLM", "llama4": "Llama4ForCausalLM",
    "llava": "LlamaForCausalLM", "glm4v": "", "aria": "AriaTextForCausalLM",
    "got_ocr2": "Qwen2ForCausalLM", "minimax_m3_vl": "", "nemotron_h_omni": "NemotronHForCausalLM",
}  # fmt: skip
# Why there is none: no class of text has the name; the class of that name reads no published experts.
REFUSED = {
    "glm4v": "'glm4v_text' by itself",
    "minimax_m3_vl": "MiniMaxM3VLForCausalLM has no parameter of that name",
}
SAMPLE = list(CLASSES)[:: 1 if os.environ.get("QCONVERT_ALL") else 3]
# Sections of a rope that fit heads of 64.
_ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}


@pytest.mark.parametrize("family", SAMPLE)
def test_the_text_model_is_the_whole_one_on_text(family: str, tmp_path: Path) -> None:
    if family not in model_types():
        pytest.skip("its class is of a newer transformers")
    given = {key: value for key, value in config(family).items() if key != "model_type"}
    if family in ("qwen2_vl", "qwen2_5_vl"):
        given["text_config"] = {"rope_parameters": _ROPE}
    source, out = saved(family, tmp_path / "source", given), tmp_path / "out"
    done = run_cli("text", source, out, "--jobs", "1")
    if family in REFUSED:
        assert done.code == 1, done.err
        assert REFUSED[family] in done.err
        return
    assert done.code == 0, done.err
    stated = json.loads((out / "config.json").read_bytes())
    assert stated["architectures"] == [CLASSES[family]] == [type(loaded(out)).__name__]
    assert not any(key.endswith("_config") for key in stated)
    assert torch.equal(logits(out), logits(source))
    report = run_cli("validate", out, "--against", source, "--level", "full", "--jobs", "1")
    assert report.code == 0, report.out
    assert "0 errors, 0 warnings" in report.out, report.out


def test_stacks_that_hold_columns_before_rows_stay_whole(tmp_path: Path) -> None:
    """As Qwen3-VL-MoE is published; transformers 5.17 saves it as its text class has it."""
    source = tmp_path / "source"
    source.mkdir()
    headers.write_sparse(headers.few("qwen3-vl-30b-a3b"), source)
    assert "takes stacks of experts the other way round" in refused(
        "text", source, tmp_path / "out", "--dry-run"
    )


def test_experts_are_as_runtimes_read_them(tmp_path: Path) -> None:
    """Qwen3-MoE's class in sglang reads one matrix per expert; that of the whole model reads stacks."""
    source, out = saved("qwen3_vl_moe", tmp_path / "source", {}), tmp_path / "out"
    done = ran("text", source, out, "--jobs", "1")
    assert "loads   sglang 0.5.23 (H200) at tp 1" in done.err
    assert "loads   vllm 0.33.0 (H200) at tp 1" in done.err
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in read_tensors(out)
    report = run_cli("validate", out, "--against", source, "--level", "full", "--jobs", "1")
    assert report.code == 0, report.out


@pytest.mark.parametrize("tied", [False, True])
def test_ties_are_stated(tied: bool, tmp_path: Path) -> None:
    """Whatever the two classes take for granted."""
    source, out = (
        saved("mistral3", tmp_path / "source", {"tie_word_embeddings": tied}),
        tmp_path / "o",
    )
    edit_json(source / "config.json", lambda c: c["text_config"].pop("tie_word_embeddings", None))
    assert run_cli("text", source, out, "--jobs", "1").code == 0
    assert json.loads((out / "config.json").read_bytes())["tie_word_embeddings"] is tied
    assert torch.equal(logits(out), logits(source))
