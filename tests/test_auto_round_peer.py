"""Folders that auto-round itself writes, of tiny models that it rounds to nearest: read, judged, and
near the weights that they were made of. How it dequantizes: tests/test_int_widths.py.

Installed by `make peers`; run with `pytest -m peer`.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import read_tensors, run_cli
from dequantized import as_torch

pytestmark = pytest.mark.peer
hf: Any = transformers

KEPT = {"o_proj": {"bits": 16}, "model.layers.1.mlp.down_proj": {"bits": 16}}
# Its `format`, what is asked for, a label of `inspect`, and the least cosine with the model's weights.
WAYS: dict[str, tuple[str, dict[str, Any], str, float]] = {
    "auto_gptq": (
        "auto_round", {"bits": 4, "group_size": 32, "layer_config": KEPT}, "GPTQ INT4 g32", 0.99,
    ),
    "several schemes": (
        "auto_round",
        {"bits": 4, "group_size": 32, "layer_config": {"q_proj": {"bits": 8}, "k_proj": {"bits": 3}}},
        "GPTQ INT3 g32", 0.97,
    ),
    "zero points": (
        "auto_round", {"bits": 3, "group_size": 32, "sym": False},
        "GPTQ INT3 g32, zero points", 0.97,
    ),
    "a row": ("auto_round", {"bits": 4, "group_size": -1}, "GPTQ INT4 per channel", 0.98),
    "2 bits": ("auto_round", {"scheme": "W2A16G32"}, "GPTQ INT2 g32", 0.8),
    "gptqmodel": (
        "auto_round:gptqmodel", {"bits": 4, "group_size": 32, "sym": False},
        "GPTQ INT4 g32, zero points", 0.99,
    ),
    "awq": ("auto_round:auto_awq", {"bits": 4, "group_size": 32}, "AWQ INT4 g32", 0.99),
    "awq, zero points": (
        "auto_round:auto_awq", {"bits": 4, "group_size": 32, "sym": False}, "AWQ INT4 g32", 0.99,
    ),
    "GPTQ's own": (
        "auto_gptq", {"bits": 4, "group_size": 32, "layer_config": {"q_proj": {"bits": 8}}},
        "GPTQ INT8 g32", 0.99,
    ),
    "AutoAWQ's own": (
        "auto_awq", {"bits": 4, "group_size": 32, "sym": False, "layer_config": KEPT},
        "AWQ INT4 g32", 0.99,
    ),
    "compressed-tensors": (
        "llm_compressor", {"scheme": "W4A16", "layer_config": {"q_proj": {"bits": 8}, **KEPT}},
        "INT8 g128 (packed)", 0.98,
    ),
    "INT8": ("llm_compressor", {"scheme": "INT8"}, "INT8", 0.999),
    "MXFP4": ("auto_round", {"scheme": "MXFP4"}, "MXFP4", 0.98),
    "MXFP8": ("auto_round", {"scheme": "MXFP8"}, "F8_E4M3", 0.999),
}  # fmt: skip


class NoTokenizer:
    """Rounding to nearest needs no data."""

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        """No file."""


def exported(
    kind: str, asked: dict[str, Any], folder: Path
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder that auto-round writes of a small model, and that model's linears."""
    config = hf.Qwen3Config(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=64, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.Qwen3ForCausalLM(config).to(torch.bfloat16)
    held = {
        name: value.detach().clone() for name, value in model.state_dict().items()
        if name.endswith("_proj.weight")
    }  # fmt: skip
    made = import_module("auto_round").AutoRound(
        model, tokenizer=NoTokenizer(), iters=0, disable_opt_rtn=True, low_gpu_mem_usage=False,
        device_map="cpu", **asked,
    )  # fmt: skip
    made.quantize_and_save(str(folder), format=kind)
    (found,) = folder.rglob("config.json")
    return found.parent, held


@pytest.mark.parametrize("way", WAYS)
def test_a_folder_that_auto_round_writes(way: str, tmp_path: Path) -> None:
    kind, asked, label, least = WAYS[way]
    source, held = exported(kind, asked, tmp_path / "auto-round")
    assert label in run_cli("inspect", source).out
    judged = json.loads(run_cli("validate", source, "--level", "full", "--json").out)
    assert [one for one in judged["findings"] if one["severity"] == "error"] == []
    done = run_cli("dequant", source, tmp_path / "out", "--jobs", "1")
    assert done.code == 0, done.err
    judged = json.loads(
        run_cli("validate", tmp_path / "out", "--against", source, "--level", "full", "--json").out
    )
    assert [one for one in judged["findings"] if one["severity"] == "error"] == []
    found = read_tensors(tmp_path / "out")
    kept = 0
    for name, value in held.items():
        read = as_torch(found[name])
        assert read.shape == value.shape
        kept += int(torch.equal(read, value))
        likeness = torch.nn.functional.cosine_similarity(
            read.double().flatten(), value.double().flatten(), dim=0
        )
        assert likeness > least, (name, likeness)
    assert kept == (3 if "o_proj" in asked.get("layer_config", {}) else 0)


def test_integers_that_share_exponents_are_refused(tmp_path: Path) -> None:
    """MXINT4: no format here."""
    source, _ = exported("auto_round", {"scheme": "MXINT4"}, tmp_path / "auto-round")
    done = run_cli("dequant", source, tmp_path / "out", "--jobs", "1")
    assert done.code == 1
    assert "states 4 bits of data_type mx_int, which is not read here" in done.err
    judged = json.loads(run_cli("validate", source, "--json").out)
    assert "QC097" in {one["rule"] for one in judged["findings"] if one["severity"] == "error"}
