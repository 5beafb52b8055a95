"""Statistics that experts are chosen by: REAP's saliency, and the choice."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from calibrate_models import calibrated, deepseek_v3, qwen3_moe, samples, saved
from checkpoints import run_cli
from loaders.published import published

from qconvert import api
from qconvert.calibrate.expert_stats import begin, save_layer
from qconvert.calibrate.settings import LayerStats, Settings
from qconvert.passes.expert_choice import chosen
from qconvert.passes.prune import Prune, _loss
from qconvert.plan.plan import Plan


def reap(folder: Path, tokens: Any) -> list[np.ndarray[Any, Any]]:
    """REAP's saliency as its paper has it, of transformers' own model: for each expert the mean, over
    the tokens that have it among their top k, of the gate's weight times the L2 norm of its answer."""
    model: Any = hf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation="eager"
    )
    model.eval()
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def look(module: Any, given: Any) -> None:
        hidden, index, weights = given[0].float(), given[1], given[2].float()
        sums, counts = found[at[module]]
        for expert in range(counts.shape[0]):
            rows, place = torch.where(index == expert)
            both = hidden[rows] @ module.gate_up_proj[expert].float().T
            gate, up = both.chunk(2, dim=-1)
            answer = (torch.nn.functional.silu(gate) * up) @ module.down_proj[expert].float().T
            sums[expert] += (answer.norm(dim=-1) * weights[rows, place]).sum()
            counts[expert] += rows.numel()

    modules = [m for name, m in model.named_modules() if name.endswith("mlp.experts")]
    at = {module: number for number, module in enumerate(modules)}
    for module in modules:
        found.append((torch.zeros(module.num_experts), torch.zeros(module.num_experts)))
        module.register_forward_pre_hook(look)
    with torch.no_grad():
        for sample in tokens:
            model.model(torch.from_numpy(sample)[None], use_cache=False)
    return [(sums / counts.clamp(min=1)).numpy() for sums, counts in found]


@pytest.mark.parametrize(("make", "experts"), [(qwen3_moe, "routed"), (deepseek_v3, "all")])
def test_saliency_is_reaps(make: Any, experts: Any, tmp_path: Path) -> None:
    folder, tokens = saved(make(), tmp_path / "model"), samples(6, 48)
    settings = Settings(experts=experts)
    kept = calibrated(folder, tmp_path / "room", tokens, [], settings)
    wanted = reap(folder, tokens)
    for (_, stats), each in zip(sorted(kept.stats.items()), wanted, strict=True):
        assert np.allclose(stats.saliency, each, rtol=0.02)
        assert stats.counts.sum() == 2 * 6 * 48


def saved_stats(folder: Path, layers: Mapping[int, tuple[list[int], list[float]]]) -> str:
    """A folder of statistics, as a calibration writes it."""
    begin(folder, {})
    for layer, (counts, saliency) in layers.items():
        rows = np.zeros((len(counts), 2), np.float32)
        save_layer(folder, layer, LayerStats(
            np.array(counts), np.array(saliency, np.float32), rows, rows, rows, rows, (), (), {}, (),
        ))  # fmt: skip
    return str(folder)


def test_the_choice(tmp_path: Path) -> None:
    """By each number, of equals the first, as many of each group; the note says what is lost."""
    stats = saved_stats(tmp_path, {3: ([4, 1, 0, 5], [0.5, 2.0, 2.0, 0.1])})
    assert chosen(stats, "reap", [3], 4, 2, 1).kept == {3: (1, 2)}
    assert chosen(stats, "reap", [3], 4, 1, 1).kept == {3: (1,)}
    assert chosen(stats, "reap", [3], 4, 2, 2).kept == {3: (1, 2)}
    by_count = chosen(stats, "frequency", [3], 4, 2, 1)
    assert by_count.kept == {3: (0, 3)}
    assert chosen(stats, "frequency", [3], 4, 2, 2).kept == {3: (0, 3)}
    assert "10 % of what it chose" in by_count.notes[0]
    assert by_count.share == 10
    assert _loss(4, 2, by_count, "frequency") == (
        "leaves out 2 of a layer's 4 experts, by frequency, which had 10 % of what routers chose"
    )


def test_statistics_that_do_not_fit(tmp_path: Path) -> None:
    stats = saved_stats(tmp_path, {0: ([4, 1], [0.5, float("nan")])})
    for layer, experts, why in (
        (1, 2, "has no layers.1.counts"), (0, 3, "these are another model's"),
        (0, 2, "expected finite numbers"),
    ):  # fmt: skip
        with pytest.raises(api.PlanError, match=re.escape(why)):
            chosen(stats, "reap", [layer], experts, 1, 1)
    with pytest.raises(api.DataError, match="expected a folder of --save-stats"):
        chosen(os.devnull, "reap", [0], 2, 1, 1)


def test_from_statistics_to_what_it_cost(tmp_path: Path) -> None:
    """A model's experts are watched, half of them left out, and the rest compared with it: better than
    with those that rank last."""
    folder = saved(qwen3_moe(num_hidden_layers=2), tmp_path / "model")
    asked = ("--synthetic", "--samples", "8", "--length", "32", "--device", "cpu")
    for _ in range(2):  # again is the same
        assert run_cli("experts", "stats", folder, tmp_path / "stats", *asked).code == 0
    names = {file.name for file in (tmp_path / "stats").iterdir()}
    assert names == {"stats.json", "hotness.pt", *(f"layer-0000{n}.safetensors" for n in range(2))}
    out = tmp_path / "out"
    done = run_cli(
        "prune", folder, out, "--experts", "4", "--stats", tmp_path / "stats", "--jobs", "1"
    )
    assert done.code == 0, done.err
    (step,) = json.loads((out / "qconvert.json").read_bytes())["passes"]
    last = {
        layer: sorted(set(range(8)) - {*kept}) for layer, kept in step["options"]["keep"].items()
    }
    (tmp_path / "last.json").write_text(json.dumps({"layers": last}))
    worse = tmp_path / "worse"
    assert (
        run_cli("prune", folder, worse, "--keep", tmp_path / "last.json", "--jobs", "1").code == 0
    )
    cost, other = (
        api.evaluate(made, folder, None, samples=4, length=32, layers=2, devices=("cpu",)).hidden
        for made in (out, worse)
    )
    assert 0 < cost[-1] < other[-1]


def test_a_draft_needs_lists(tmp_path: Path) -> None:
    """Statistics are of the model's own layers; lists of those of the draft go with them."""
    checkpoint = api.open_checkpoint(
        str(published("glm4_moe", experts=4, inner=128).write(tmp_path / "m"))
    )
    dims = checkpoint.role_index.dims
    layers = dims.groups["moe"]
    stats = saved_stats(tmp_path / "s", dict.fromkeys(layers, ([1, 2, 3, 4], [4.0, 3.0, 2.0, 1.0])))
    plan = Plan.identity(checkpoint)
    with pytest.raises(api.PlanError, match=f"layer {dims.num_layers} is a draft"):
        Prune(experts=2, stats=stats)(plan)
    made = Prune(experts=2, stats=stats, keep={dims.num_layers: (0, 2)})(plan)
    assert made.log[-1].options["keep"] == {
        **{str(layer): [0, 1] for layer in layers}, str(dims.num_layers): [0, 2],
    }  # fmt: skip
