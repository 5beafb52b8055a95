"""`qconvert eval` of every family that can be run a layer at a time, tiny, dense and sparse: KL,
perplexity and hidden states are those of the whole model as transformers runs it.

`QCONVERT_ALL=1 pytest -m peer tests/families/test_eval.py` runs all families, else one in twelve.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import eval_oracle as oracle
import numpy as np
import pytest

from families.classes import config
from families.loading import loaded
from families.tiny import saved
from qconvert.checkpoint.open import open_source
from qconvert.core.errors import PlanError
from qconvert.evaluate.engine import evaluate
from qconvert.evaluate.result import Evaluation
from qconvert.samples.data import DataSpec

pytestmark = pytest.mark.peer

# Embeddings that are multiplied, logits that are capped or divided, state spaces, vision towers.
FAMILIES = [
    "gemma2", "llama", "qwen2", "qwen3", "gemma3", "cohere2", "granite", "phi3", "mistral", "glm4",
    "olmo2", "smollm3", "arcee", "gemma3_text", "qwen2_5_vl", "mixtral", "qwen2_moe", "olmoe",
    "flex_olmo", "minimax", "minimax_m2", "minimax_m3_vl", "ernie4_5_moe", "hunyuan_v1_moe", "hy_v3",
    "phimoe", "glm4_moe_lite", "jamba", "kimi_linear", "lfm2_moe", "mimo_v2_flash", "solar_open",
    "exaone_moe", "cohere2_moe", "afmoe", "laguna", "mistral4", "mellum", "granitemoe",
    "granitemoeshared", "granitemoehybrid", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_vl_moe",
    "deepseek_v2", "deepseek_v3", "dots1",
]  # fmt: skip
ALL = bool(os.environ.get("QCONVERT_ALL"))
SAMPLES = [np.random.default_rng(length).integers(3, 250, length) for length in (30, 17)]


def made(family: str, folder: Path) -> Path:
    given = {key: value for key, value in config(family).items() if key != "model_type"}
    return saved(family, folder, given)


def ran(folder: Path) -> oracle.Run:
    model = loaded(folder)
    for settings in (model.config, model.config.get_text_config()):
        settings._experts_implementation = "eager"
    return oracle.run(model, SAMPLES)


def evaluated(repo: Path, source: Path, file: Path) -> Evaluation:
    file.write_text("".join(f"{json.dumps({'input_ids': ids.tolist()})}\n" for ids in SAMPLES))
    spec = DataSpec(str(file), len(SAMPLES), 64)
    return evaluate([open_source(repo)], open_source(source), spec, devices=["cpu"])


@pytest.mark.parametrize("family", FAMILIES[:: 1 if ALL else 12])
def test_a_family_is_its_whole_model(family: str, tmp_path: Path) -> None:
    source = made(family, tmp_path / "source")
    repo = oracle.nudged(loaded(source), tmp_path / "repo")
    expected = oracle.compared(ran(source), ran(repo), SAMPLES)
    found = evaluated(repo, source, tmp_path / "ids.jsonl")
    assert found.logits is not None
    assert found.logits.kl == pytest.approx(expected.kl, abs=1e-7)
    assert found.logits.perplexity == pytest.approx(expected.perplexity, rel=1e-6)
    assert found.hidden == pytest.approx(expected.hidden, rel=1e-6)
    assert min(found.hidden) > 0


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("bamba", "does not call its layers in turn"),
        ("gpt_oss", "have biases"),
    ],
)
def test_what_cannot_be_run_is_refused(family: str, says: str, tmp_path: Path) -> None:
    source = made(family, tmp_path / "source")
    with pytest.raises(PlanError, match=says):
        evaluated(source, source, tmp_path / "ids.jsonl")
