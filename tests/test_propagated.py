"""What layers are solved against where propagated errors are corrected: the formula in float64, of what
transformers' own models see; where there is nothing to correct, and where nothing can be said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibrate_models import EXPERTS, Kept, calibrated, hf, meant, qwen3_moe, samples, saved
from safetensors.torch import load_file, save_file

from qconvert.calibrate import experts, solve
from qconvert.calibrate.propagated_error import corrected
from qconvert.calibrate.settings import ExpertSchemes, Settings
from qconvert.calibrate.solve import rounded
from qconvert.cli.demo import heavy_tailed
from qconvert.core.int_scheme import IntScheme

Doubles = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
CORRECT = Settings(min_tokens=1, propagated_error="correct")
G32 = IntScheme(4, 32)
TOKENS = samples(6, 40)


def wanted(weight: Doubles, given: Doubles, plain: Doubles) -> Doubles:
    """W + a W (dX^T X~)(X~^T X~ + l I)^-1 of inputs X~ and X [T, K], a = .5, l = .05 of the mean."""
    hessian = given.T @ given
    damped = hessian + 0.05 * hessian.diagonal().mean() * np.eye(len(hessian))
    found: Doubles = weight + 0.5 * weight @ ((plain - given).T @ given) @ np.linalg.inv(damped)
    return found


def doubles(tensor: torch.Tensor) -> Doubles:
    found: Doubles = tensor.detach().double().numpy()
    return found


def inputs(seed: int, tokens: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 [T, K] of a quantized and of an unquantized stream, with outlier channels."""
    generator = torch.Generator().manual_seed(seed)
    outlier = torch.exp2(torch.randn(columns, generator=generator).round())
    plain = torch.randn(tokens, columns, generator=generator) * outlier
    off = plain @ torch.randn(columns, columns, generator=generator) / columns**0.5
    return (plain + 0.1 * off).bfloat16(), plain.bfloat16()


def summed(given: torch.Tensor, plain: torch.Tensor) -> experts.InputStats:
    found = experts.input_stats(given.shape[1], "cpu", paired=True)
    for start in range(0, given.shape[0], 24):
        found.add(given[start : start + 24], plain[start : start + 24])
    return found


@pytest.mark.parametrize("tokens", [500, 30])
def test_the_target_is_the_formula(tokens: int) -> None:
    """Of enough tokens, and of fewer than columns. Differences are counted in BF16, to a part in 256."""
    given, plain = inputs(1, tokens, 64)
    weight = heavy_tailed((1500, 64), torch.Generator().manual_seed(2)).bfloat16()
    sums = summed(given, plain)
    assert sums.cross is not None
    made = corrected(weight, sums.hessian.clone(), sums.cross)
    assert made.dtype == torch.float32
    right = wanted(doubles(weight), doubles(given), doubles(plain))
    shift = np.linalg.norm(right - doubles(weight))
    assert shift > 0.03 * np.linalg.norm(doubles(weight))
    assert np.linalg.norm(doubles(made) - right) < 0.004 * shift
    # It is what the quantized stream is to answer: nearer to the unquantized answers than W is.
    answers = doubles(plain) @ doubles(weight).T
    off = [np.linalg.norm(doubles(given) @ one.T - answers) for one in (right, doubles(weight))]
    assert off[0] < 0.7 * off[1]


def test_equal_streams_leave_weights_as_they_are() -> None:
    given, _ = inputs(3, 200, 64)
    weight = heavy_tailed((40, 64), torch.Generator().manual_seed(2)).bfloat16()
    sums = summed(given, given)
    assert sums.cross is not None
    assert torch.equal(corrected(weight, sums.hessian, sums.cross), weight.float())


def test_a_column_that_the_quantized_stream_never_sees_keeps_its_weights() -> None:
    """The others make up for what it answers in the unquantized model."""
    given, plain = inputs(4, 300, 64)
    given[:, [3, 40]] = 0
    weight = heavy_tailed((40, 64), torch.Generator().manual_seed(2)).bfloat16()
    sums = summed(given, plain)
    assert sums.cross is not None
    made = corrected(weight, sums.hessian, sums.cross)
    assert torch.equal(made[:, [3, 40]], weight[:, [3, 40]].float())
    right = wanted(doubles(weight), doubles(given), doubles(plain))
    assert np.allclose(doubles(made), right, rtol=0, atol=0.002 * np.abs(right).max())


@pytest.mark.parametrize("broken", [-1e6, float("nan"), float("inf")])
def test_where_nothing_can_be_said_weights_are_the_target(broken: float) -> None:
    given, plain = inputs(5, 100, 64)
    weight = heavy_tailed((40, 64), torch.Generator().manual_seed(2)).bfloat16()
    sums = summed(given, plain)
    assert sums.cross is not None
    hessian, cross = sums.hessian.clone(), sums.cross.clone()
    hessian[0, 0] = broken
    assert torch.equal(corrected(weight, hessian, cross), weight.float())
    if broken > 0 or broken != broken:
        cross[0, 0] = broken
        assert torch.equal(corrected(weight, sums.hessian, cross), weight.float())
    nothing = torch.zeros(64, 64)
    assert torch.equal(corrected(weight, nothing, nothing), weight.float())


class Targets:
    """What the engine solves against, in its order: gate_up of each expert, then down of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[torch.Tensor] = []

        def keeping(*args: Any) -> torch.Tensor:
            self.made.append(corrected(*args))
            return self.made[-1].clone()

        monkeypatch.setattr(experts, "corrected", keeping)

    def of(self, layer: int, expert: int, name: str) -> torch.Tensor:
        return self.made[(2 * layer + (name == "down")) * EXPERTS + expert]


def solved(folder: Path, work: Path, settings: Settings = CORRECT, *schemes: Any) -> Kept:
    return calibrated(folder, work, TOKENS, schemes or [G32], settings)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of Qwen3-MoE."""
    return saved(qwen3_moe(num_hidden_layers=2), tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def ours(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return solved(small, tmp_path_factory.mktemp("ours") / "work")


def seen_by_experts(folder: Path, layer: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """What transformers' whole model gives a layer's experts: inputs BF16 [T, H], routes [T, k], and
    the module."""
    model = hf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, experts_implementation="eager"
    ).eval()
    module = model.model.layers[layer].mlp.experts
    seen: list[Any] = []
    module.register_forward_pre_hook(lambda m, args: seen.append(args))
    with torch.no_grad():
        for sample in TOKENS:
            model.model(torch.from_numpy(sample)[None], use_cache=False)
    rows = torch.cat([args[0].reshape(-1, args[0].shape[-1]) for args in seen])
    return rows, torch.cat([args[1] for args in seen]), module


def middle(module: Any, expert: int, rows: torch.Tensor) -> torch.Tensor:
    """What goes into an expert's down_proj."""
    with torch.no_grad():
        gate, up = torch.nn.functional.linear(rows, module.gate_up_proj[expert]).chunk(2, -1)
        found: torch.Tensor = module.act_fn(gate) * up
    return found


def test_layers_are_solved_against_the_formula(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models of transformers, one with the codes that were found, give X and X~ of the same tokens:
    those that the quantized one's router gives an expert."""
    targets = Targets(monkeypatch)
    kept = solved(small, tmp_path / "work")
    stored = load_file(small / "model.safetensors")
    for (layer, expert, kind), (codes,) in kept.made.items():
        stored[f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight"] = meant(codes, G32)
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    save_file(stored, quantized / "model.safetensors", metadata={"format": "pt"})
    (quantized / "config.json").write_bytes((small / "config.json").read_bytes())
    differing = 0
    for layer in (0, 1):
        plain, theirs, unquantized = seen_by_experts(small, layer)
        given, routes, served = seen_by_experts(quantized, layer)
        differing += int((theirs != routes).any())
        for expert in range(EXPERTS):
            mine = (routes == expert).any(-1)
            if not mine.any():
                continue
            into = doubles(given[mine]), doubles(plain[mine])
            gate_up, down = (getattr(unquantized, f"{n}_proj")[expert] for n in ("gate_up", "down"))
            right = wanted(doubles(gate_up), *into)
            made = targets.of(layer, expert, "gate_up")
            if layer == 0:  # no expert came before
                assert torch.equal(made, gate_up.float())
            shift = np.linalg.norm(right - doubles(gate_up))
            assert np.linalg.norm(doubles(made) - right) <= 0.01 * shift
            outof = middle(served, expert, given[mine]), middle(unquantized, expert, plain[mine])
            right = wanted(doubles(down), doubles(outof[0]), doubles(outof[1]))
            shift = np.linalg.norm(right - doubles(down))
            assert shift > 0.005 * np.linalg.norm(doubles(down))
            assert np.linalg.norm(doubles(targets.of(layer, expert, "down")) - right) < 0.02 * shift
    assert differing  # the routers of both do not agree


def test_codes_differ_where_there_is_something_to_correct(
    small: Path, ours: Kept, tmp_path: Path
) -> None:
    plain = solved(small, tmp_path / "plain", replace(CORRECT, propagated_error="ignore"))
    for key, (codes,) in ours.made.items():
        layer, _, kind = key
        same = np.array_equal(codes.codes, plain.made[key][0].codes)
        assert same == (layer == 0 and kind != "down_proj"), key


def test_a_matrix_that_cannot_be_solved_is_rounded_from_its_own_weights(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def failing(weights: Any, *rest: Any) -> Any:
        return solve.solved(weights, *rest)[0], [True] * len(weights)

    monkeypatch.setattr(experts, "solved", failing)
    kept = solved(small, tmp_path / "work")
    stored = load_file(small / "model.safetensors")
    assert len(kept.stats[1].fallbacks) == 3 * EXPERTS
    for (layer, expert, kind), (codes,) in kept.made.items():
        weight = stored[f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight"]
        assert np.array_equal(codes.codes, rounded(weight, G32, CORRECT).numpy().codes)


def test_the_first_scheme_says_what_is_corrected(small: Path, ours: Kept, tmp_path: Path) -> None:
    """Of several, its answers are those that go on; in the first layer's gate and up there is nothing
    to correct for either."""
    row = IntScheme(4, None, scale_dtype="F32", narrow=True)
    both = solved(small, tmp_path / "both", CORRECT, G32, ExpertSchemes(row, row))
    second = solved(small, tmp_path / "second", CORRECT, ExpertSchemes(row, row))
    differing = 0
    for key, (one, two) in both.made.items():
        assert np.array_equal(one.codes, ours.made[key][0].codes), key
        same = np.array_equal(two.codes, second.made[key][0].codes)
        assert same or key[0] or key[2] == "down_proj", key
        differing += not same
    assert differing


def test_statistics_alone_keep_one_stream(small: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    kept = calibrated(small, work, TOKENS, [], CORRECT)
    assert set(kept.stats) == {0, 1}
    assert sorted(path.name for path in work.iterdir()) == ["hidden.2.0.rows", "state.json"]
