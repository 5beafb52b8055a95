"""A dense model and a model with experts, all of whose linears the command calibrated: validators find
it sound (what they find: test_calibrated_validate.py), transformers computes with it what our decoder
makes of it, and a recipe of llm-compressor gives the bytes of the command.

Run with `pytest -m peer tests/test_linears_validate.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from calibrate_models import hf, llama, qwen3_next, samples, saved
from checkpoints import ran, read_tensors, run_cli
from families.loading import logits
from safetensors.torch import save_file

from qconvert.validation.findings import Finding
from qconvert.validation.runner import Request, validate_folder

pytestmark = pytest.mark.peer

COUNT, LENGTH = 24, 96
O = "model.layers.1.self_attn.o_proj"  # noqa: E741
RECIPE = """
quant_stage:
  quant_modifiers:
    GPTQModifier:
      ignore: [lm_head]
      config_groups:
        group_0:
          targets: [Linear]
          weights: {num_bits: 4, group_size: 32, strategy: group, symmetric: true}
      actorder: null
"""
SOLVERS = ("best", "llmcompressor")
EVERY = ("--group-size", "32", "--targets", "Linear")
WAYS: Mapping[str, tuple[str, ...]] = {
    "packed": EVERY,
    "asymmetric": (*EVERY, "--asymmetric"),
    "ordered": (*EVERY, "--actorder", "group", "--packing", "gptq"),
    "rows": ("--group-size", "channel", "--targets", "Linear"),
    "rows of 8 bits": ("--bits", "8", "--group-size", "channel", "--targets", "Linear"),
}


def data_of(folder: Path) -> tuple[str | Path, ...]:
    data = folder / "tokens.safetensors"
    if not data.exists():
        save_file({"input_ids": torch.from_numpy(np.stack(samples(COUNT, LENGTH)))}, data)
    return "--data", data, "--samples", str(COUNT), "--length", str(LENGTH)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The model, and what each way and solver makes of it."""
    folder = tmp_path_factory.mktemp("dense")
    config = llama(intermediate_size=512, hidden_size=256)
    found = {"model": saved(config, folder / "model")}
    for solver in SOLVERS:
        for way, options in WAYS.items():
            out = found[f"{solver} {way}"] = folder / f"{solver} {way}"
            ran(
                "w4a16", found["model"], out, "--gptq", *options, *data_of(folder),
                "--solver", solver,
            )  # fmt: skip
    return found


def findings(folder: Path, source: Path, level: str = "full") -> list[Finding]:
    request = Request("full" if level == "full" else "sample", jobs=1)
    return list(validate_folder(folder, str(source), request=request).findings)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_calibrated_linears_have_no_finding(
    solver: str, way: str, dense: Mapping[str, Path]
) -> None:
    out = dense[f"{solver} {way}"]
    for level in ("sample", "full"):
        assert findings(out, dense["model"], level) == []
    held = read_tensors(out)
    code = "qweight" if way == "ordered" else "weight_packed"
    assert sum(name.endswith(code) for name in held) == 2 * 7
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= held.keys()


@pytest.mark.parametrize("solver", SOLVERS)
def test_transformers_computes_what_our_decoder_makes(
    solver: str, dense: Mapping[str, Path], tmp_path: Path
) -> None:
    """Logits of the packed folder, loaded by transformers and compressed-tensors, and of the folder that
    `dequant` makes of it."""
    for way in ("packed", "asymmetric", "rows of 8 bits"):
        out = dense[f"{solver} {way}"]
        plain = tmp_path / way
        assert run_cli("dequant", out, plain).code == 0
        theirs, ours = logits(out), logits(plain)
        assert torch.equal(theirs, ours), way
        assert not torch.equal(ours, logits(dense["model"]))


def test_a_recipe_of_llm_compressor_is_the_command_with_its_solver(
    dense: Mapping[str, Path], tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    out = tmp_path / "out"
    ran("run", recipe, dense["model"], out, *data_of(dense["model"].parent))
    ours, theirs = read_tensors(dense["llmcompressor packed"]), read_tensors(out)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].data == theirs[name].data for name in ours)


def test_it_is_better_than_rounding(dense: Mapping[str, Path], tmp_path: Path) -> None:
    """Of logits on the calibration's kind of data: the mean square of what is lost. Of weights alone
    rounding is better, so that only activations can show it."""
    out = tmp_path / "rtn"
    assert run_cli("w4a16", dense["model"], out, "--rtn", *EVERY).code == 0
    tokens = torch.from_numpy(np.stack(samples(16, LENGTH, seed=99)))

    def computed(folder: Path) -> torch.Tensor:
        model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        with torch.no_grad():
            found: torch.Tensor = model(tokens).logits.float()
        return found

    wanted = computed(dense["model"])
    lost = {
        name: float((computed(folder) - wanted).square().mean())
        for name, folder in (("rtn", out), *((s, dense[f"{s} packed"]) for s in SOLVERS))
    }
    print(lost)
    assert lost["best"] < lost["llmcompressor"] < lost["rtn"]


def test_experts_shared_experts_and_attention_together(tmp_path: Path) -> None:
    """Qwen3-Next: linear attention's outputs, attention, shared and routed experts."""
    source = saved(qwen3_next(shared_expert_intermediate_size=128), tmp_path / "model")
    out = tmp_path / "out"
    ran("w4a16", source, out, "--gptq", *EVERY, *data_of(tmp_path))
    held = read_tensors(out)
    for name in ("layers.0.linear_attn.out_proj", "layers.3.self_attn.q_proj",
                 "layers.1.mlp.shared_expert.down_proj", "layers.1.mlp.experts.7.up_proj"):  # fmt: skip
        assert f"model.{name}.weight_packed" in held
    for name in ("mlp.gate", "mlp.shared_expert_gate", "linear_attn.conv1d"):
        assert f"model.layers.0.{name}.weight" in held
    assert findings(out, source) == []
