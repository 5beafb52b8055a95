"""What calibrated codes are worth: the whole model's output on tokens that calibration did not see,
against rounding to nearest, and for AMX against rows searched for the least weight error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibrate_models import FAMILIES, HIDDEN, Make, calibrated, hf, qwen3_moe, samples, saved

from qconvert.calibrate.settings import ExpertSchemes, Settings, Solver
from qconvert.calibrate.solve import rounded
from qconvert.core.dtypes import TensorType
from qconvert.core.graph import Buffer
from qconvert.core.int_scheme import Codes, IntScheme, Nvfp4Scheme
from qconvert.formats.amx.encode import Amx
from qconvert.validators.reading.amx import tile_floats

SETTINGS = Settings(min_tokens=1)
SOLVERS: tuple[Solver, ...] = ("best", "llmcompressor")
Key = tuple[int, int, str]


def meant(codes: Codes, group: int | None) -> torch.Tensor:
    """What codes stand for, computed anew: (code - zero) * scale of the column's group."""
    columns = codes.codes.shape[1]
    g_idx = codes.g_idx if codes.g_idx is not None else np.arange(columns) // (group or columns)
    zero = 0 if codes.zero is None else codes.zero[:, g_idx].astype(np.float32)
    value = (codes.codes.astype(np.float32) - zero) * codes.scale[:, g_idx]
    return torch.from_numpy(value)


def experts(model: Any, key: Key) -> torch.Tensor:
    """The matrix of one expert, a view of the model's stack."""
    layer, expert, kind = key
    stack = model.model.layers[layer].mlp.experts
    if kind == "down_proj":
        down: torch.Tensor = stack.down_proj.data[expert]
        return down
    gate, up = stack.gate_up_proj.data[expert].chunk(2)
    found: torch.Tensor = gate if kind == "gate_proj" else up
    return found


def loaded(folder: Path, matrices: Mapping[Key, torch.Tensor] | None = None) -> Any:
    model = hf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    for key, matrix in (matrices or {}).items():
        experts(model, key).copy_(matrix)
    return model


def last_states(model: Any, tokens: list[Any]) -> torch.Tensor:
    """What comes out of the last layer, samples one after another."""
    found: list[torch.Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(
        lambda m, a, result: found.append(result[0].reshape(-1, HIDDEN))
    )
    with torch.no_grad():
        for sample in tokens:
            model.model(torch.from_numpy(sample)[None], use_cache=False)
    hook.remove()
    return torch.cat(found)


def error(folder: Path, matrices: Mapping[Key, torch.Tensor], tokens: list[Any]) -> float:
    """Relative error of the last layer's states."""
    right = last_states(loaded(folder), tokens)
    wrong = last_states(loaded(folder, matrices), tokens) - right
    return float(wrong.norm() / right.norm())


def to_nearest(folder: Path, keys: list[Key], scheme: IntScheme) -> dict[Key, torch.Tensor]:
    model = loaded(folder)
    plain = Settings(solver="llmcompressor", search="none")
    return {
        key: meant(rounded(experts(model, key).bfloat16(), scheme, plain).numpy(), scheme.group)
        for key in keys
    }


@pytest.mark.big
@pytest.mark.parametrize(
    "make",
    # One family stands for the others.
    [
        pytest.param(make, id=make.__name__, marks=[] if make is qwen3_moe else pytest.mark.rest)
        for make in FAMILIES
    ],
)
def test_it_beats_rounding_to_nearest_on_unseen_tokens(make: Make, tmp_path: Path) -> None:
    folder = saved(make(), tmp_path / "model")
    scheme = IntScheme(4, 64)
    kept = calibrated(folder, tmp_path / "room", samples(24, 64), [scheme], SETTINGS)
    unseen = samples(7, 64, seed=99)
    ours = {key: meant(made[0], scheme.group) for key, made in kept.made.items()}
    found = error(folder, ours, unseen)
    nearest = error(folder, to_nearest(folder, list(ours), scheme), unseen)
    print(f"{make.__name__}: relative error {found:.4f}, rounded to nearest {nearest:.4f}")
    assert found < 0.9 * nearest


@pytest.mark.big
def test_nvfp4_beats_rounding_to_nearest_on_unseen_tokens(tmp_path: Path) -> None:
    """Also with scales searched for."""
    folder = saved(qwen3_moe(), tmp_path / "model")
    scheme = Nvfp4Scheme("modelopt")
    kept = calibrated(folder, tmp_path / "room", samples(24, 64), [scheme], SETTINGS)

    def fp4(codes: Codes) -> torch.Tensor:
        assert codes.global_scale is not None
        scale = np.repeat(codes.scale * np.float32(codes.global_scale), 16, axis=1)
        return torch.from_numpy(codes.codes.astype(np.float32) / 2 * scale)

    def nearest(settings: Settings) -> float:
        model = loaded(folder)
        matrices = {
            key: fp4(rounded(experts(model, key).bfloat16(), scheme, settings).numpy())
            for key in kept.made
        }
        return error(folder, matrices, unseen)

    unseen = samples(7, 64, seed=99)
    found = error(folder, {key: fp4(made[0]) for key, made in kept.made.items()}, unseen)
    plain, searched = nearest(Settings(scales="amax")), nearest(Settings())
    print(f"relative error {found:.4f}, rounded {plain:.4f}, scales searched {searched:.4f}")
    assert found < 0.8 * min(plain, searched)


def amx_searched(weight: torch.Tensor, shards: int) -> torch.Tensor:
    """A matrix as AMXINT4 with searched steps computes with it."""
    rows, columns = weight.shape
    op = Amx("int4", shards, "search")
    kind = TensorType("BF16", (rows, columns))
    data = bytearray(weight.bfloat16().contiguous().view(torch.uint8).numpy().tobytes())
    outs = [Buffer(t, memoryview(bytearray(t.nbytes))) for t in op.infer(kind)]
    op.run([Buffer(kind, memoryview(data))], outs, memoryview(bytearray(op.scratch(kind))))
    parts = [
        tile_floats(
            "int4", np.frombuffer(outs[2 * n].data, np.uint8),
            np.frombuffer(outs[2 * n + 1].data, np.float32), columns // shards,
        )
        for n in range(shards)
    ]  # fmt: skip
    return torch.from_numpy(np.concatenate(parts, axis=1))


@pytest.mark.big
@pytest.mark.parametrize(
    ("scheme", "most"),
    [(IntScheme(4, 128), 0.93), (IntScheme(4, 32), 0.93),
     (IntScheme(4, None, scale_dtype="F32", narrow=True), 0.99)],
    ids=["g128", "g32", "narrow rows"],
)  # fmt: skip
def test_the_best_solver_beats_llm_compressors_on_unseen_tokens(
    scheme: IntScheme, most: float, tmp_path: Path
) -> None:
    folder = saved(qwen3_moe(num_hidden_layers=2), tmp_path / "model")
    errors = []
    for solver in SOLVERS:
        kept = calibrated(
            folder,
            tmp_path / solver,
            samples(24, 64),
            [scheme],
            Settings(min_tokens=1, solver=solver),
        )
        ours = {key: meant(made[0], scheme.group) for key, made in kept.made.items()}
        errors.append(error(folder, ours, samples(7, 64, seed=99)))
    print(f"relative error {errors[0]:.4f}, llm-compressor's solver {errors[1]:.4f}")
    assert errors[0] < most * errors[1]


@pytest.mark.big
def test_amx_codes_beat_searched_rounding(tmp_path: Path) -> None:
    """Per-row four-bit codes, down's columns in two NUMA shards with a step each."""
    folder = saved(qwen3_moe(moe_intermediate_size=256), tmp_path / "model")
    row = IntScheme(4, None, scale_dtype="F32", narrow=True)
    shard = IntScheme(4, 128, scale_dtype="F32", narrow=True)
    kept = calibrated(
        folder, tmp_path / "room", samples(24, 64), [ExpertSchemes(row, shard)], SETTINGS
    )
    ours = {}
    for key, (codes,) in kept.made.items():
        assert codes.codes.min() >= -7
        assert codes.codes.max() <= 7
        assert codes.scale.shape[1] == (2 if key[2] == "down_proj" else 1)
        ours[key] = meant(codes, 128 if key[2] == "down_proj" else None)
    model = loaded(folder)
    searched = {
        key: amx_searched(experts(model, key), 2 if key[2] == "down_proj" else 1) for key in ours
    }
    unseen = samples(7, 64, seed=99)
    found, other = error(folder, ours, unseen), error(folder, searched, unseen)
    print(f"relative error {found:.4f}, searched rounding {other:.4f}")
    assert found < 0.9 * other


@pytest.mark.big
def test_a_search_for_scales_pays_for_rows(tmp_path: Path) -> None:
    folder = saved(qwen3_moe(num_hidden_layers=2), tmp_path / "model")
    row = IntScheme(4, None, scale_dtype="F32", narrow=True)
    errors = []
    for search in ("narrow", "none"):
        settings = Settings(min_tokens=1, search=search, solver="llmcompressor")
        kept = calibrated(folder, tmp_path / search, samples(24, 64), [row], settings)
        ours = {key: meant(made[0], None) for key, made in kept.made.items()}
        errors.append(error(folder, ours, samples(7, 64, seed=99)))
    assert errors[0] < errors[1]
