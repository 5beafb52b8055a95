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
from made_once import made_once
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


# Each storage is read alike whoever found its codes.
MADE = [
    "best packed", "best asymmetric", "best rows", "llmcompressor packed", "llmcompressor ordered",
    "llmcompressor rows of 8 bits",
]  # fmt: skip


def data() -> tuple[str | Path, ...]:
    held = {"input_ids": torch.from_numpy(np.stack(samples(COUNT, LENGTH)))}
    file = made_once("linears/tokens.safetensors", lambda file: save_file(held, file))
    return "--data", file, "--samples", str(COUNT), "--length", str(LENGTH)


def model() -> Path:
    config = llama(intermediate_size=512, hidden_size=256)
    return made_once("linears/model", lambda folder: saved(config, folder))


def made(name: str) -> Path:
    """What a solver and a way make of the model."""
    solver, _, way = name.partition(" ")
    options = ("--gptq", *WAYS[way], *data(), "--solver", solver)
    return made_once(f"linears/{name}", lambda out: ran("w4a16", model(), out, *options))


def findings(folder: Path, source: Path, level: str = "full") -> list[Finding]:
    request = Request("full" if level == "full" else "sample", jobs=1)
    return list(validate_folder(folder, str(source), request=request).findings)


@pytest.mark.parametrize("name", MADE)
def test_calibrated_linears_have_no_finding(name: str) -> None:
    out = made(name)
    for level in ("sample", "full"):
        assert findings(out, model(), level) == []
    held = read_tensors(out)
    code = "qweight" if name.endswith("ordered") else "weight_packed"
    assert sum(name.endswith(code) for name in held) == 2 * 7
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= held.keys()


@pytest.mark.parametrize("name", ["best packed", "best asymmetric", "llmcompressor rows of 8 bits"])
def test_transformers_computes_what_our_decoder_makes(name: str, tmp_path: Path) -> None:
    """Logits of the packed folder, loaded by transformers and compressed-tensors, and of the folder that
    `dequant` makes of it."""
    plain = tmp_path / "plain"
    assert run_cli("dequant", made(name), plain).code == 0
    theirs, ours = logits(made(name)), logits(plain)
    assert torch.equal(theirs, ours)
    assert not torch.equal(ours, logits(model()))


def test_a_recipe_of_llm_compressor_is_the_command_with_its_solver(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    out = tmp_path / "out"
    ran("run", recipe, model(), out, *data())
    ours, theirs = read_tensors(made("llmcompressor packed")), read_tensors(out)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].data == theirs[name].data for name in ours)


def test_it_is_better_than_rounding(tmp_path: Path) -> None:
    """Of logits on the calibration's kind of data: the mean square of what is lost. Of weights alone
    rounding is better, so that only activations can show it."""
    out = tmp_path / "rtn"
    assert run_cli("w4a16", model(), out, "--rtn", *EVERY).code == 0
    tokens = torch.from_numpy(np.stack(samples(16, LENGTH, seed=99)))

    def computed(folder: Path) -> torch.Tensor:
        loaded = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        with torch.no_grad():
            found: torch.Tensor = loaded(tokens).logits.float()
        return found

    wanted = computed(model())
    lost = {
        name: float((computed(folder) - wanted).square().mean())
        for name, folder in (("rtn", out), *((s, made(f"{s} packed")) for s in SOLVERS))
    }
    print(lost)
    assert lost["best"] < lost["llmcompressor"] < lost["rtn"]


def test_experts_shared_experts_and_attention_together(tmp_path: Path) -> None:
    """Qwen3-Next: linear attention's outputs, attention, shared and routed experts."""
    source = saved(qwen3_next(shared_expert_intermediate_size=128), tmp_path / "model")
    out = tmp_path / "out"
    ran("w4a16", source, out, "--gptq", *EVERY, *data())
    held = read_tensors(out)
    for name in ("layers.0.linear_attn.out_proj", "layers.3.self_attn.q_proj",
                 "layers.1.mlp.shared_expert.down_proj", "layers.1.mlp.experts.7.up_proj"):  # fmt: skip
        assert f"model.{name}.weight_packed" in held
    for name in ("mlp.gate", "mlp.shared_expert_gate", "linear_attn.conv1d"):
        assert f"model.layers.0.{name}.weight" in held
    assert findings(out, source) == []
