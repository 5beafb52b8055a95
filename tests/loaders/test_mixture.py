"""Mixtures in the runtimes' own loaders: each group of the config finds its modules, and what the
simulator says of parts that it knows is what the loader does."""

from __future__ import annotations

from pathlib import Path

import pytest

from loaders.agree_classes import of_model
from loaders.client import PYTHON, Server
from loaders.folders import assert_whole, source
from qconvert import api
from qconvert.fit.groups import Group, model_of, solved_steps, steps_of
from qconvert.runtimes.consumers import Consumer
from qconvert.samples.request import Calibration

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(
        not (PYTHON.parent.parent / "vllm").is_dir(), reason="needs the loaders: make loaders"
    ),
]

# No activations are quantized, so their scales are never filled; kernels sort by no group indices.
UNWRITTEN = (
    "_input_global_scale", "input_scale", "input_global_scale", "_blockscale_swizzled", "_g_idx",
    "_g_idx_sort_indices",
)  # fmt: skip
_ATTENTION = "--targets re:.*attn.*"
_FIRST, _SECOND = (rf"re:.*layers\.{layer}\..*experts.*" for layer in (0, 1))
_LINEARS = (
    "fp8 --channel --targets o_proj then w4a16 --rtn --targets down_proj then nvfp4 --dialect "
    r"compressed-tensors --targets re:.*\.0\..*(gate|up)_proj"
)
_MIXTURES = {
    "qwen3_moe": (
        f"fp8 --channel {_ATTENTION} then w4a16 --rtn",
        f"w4a16 --rtn --bits 8 {_ATTENTION} then nvfp4 --dialect compressed-tensors",
        f"w4a16 --rtn then int8 {_ATTENTION}",
        # Experts of one layer each, and those of the other as they are.
        f"w4a16 --rtn --targets {_FIRST} then w4a16 --rtn --group-size 32 --targets {_SECOND}",
        f"w4a16 --rtn --targets {_FIRST} then fp8 --channel --targets o_proj --targets {_SECOND}",
        f"w4a16 --rtn --targets {_SECOND}",
    ),
    "deepseek_v3": (f"fp8 --channel {_ATTENTION} then w4a16 --rtn",),
    "llama": (_LINEARS,),
}


@pytest.mark.parametrize("model", _MIXTURES)
def test_simulators_and_loaders_agree(
    model: str, hopper: Server, vllm: Server, tmp_path: Path
) -> None:
    for runtime, server in {"sglang": hopper, "vllm": vllm}.items():
        found = list(of_model(model, tmp_path, runtime, server, _MIXTURES[model]))
        assert {one.command for one in found} == set(_MIXTURES[model])
        assert [one for one in found if one.differences] == []
        assert all(one.loaded for one in found if one.tp == 1)


_CALIBRATION = Calibration(synthetic=True, samples=4, length=48, devices=("cpu",))


@pytest.mark.parametrize("experts", ["w4a16-g128", "nvfp4"])
def test_calibrated_mixtures_load_whole(
    experts: str, blackwell: Server, vllm: Server, folders: Path
) -> None:
    """As `fit` writes them: experts of each layer in a form of their own. Parameters are those of
    rounded codes, and some have other numbers."""
    origin = source(folders, "qwen3_moe")
    model = model_of(api.open_checkpoint(origin), Consumer("vllm"))
    forms = {"mlp.experts": ["w4a16-g32", experts], "self_attn.o_proj": ["fp8-channel"]}
    chosen: dict[str, list[Group]] = {}
    for part, groups in model.parts.items():
        for number, group in enumerate(groups):
            some = forms.get(part, ["w4a16-g32"])
            chosen.setdefault(some[number % len(some)], []).append(group)
    solved = solved_steps(model, chosen, _CALIBRATION)
    assert set(solved.groups) == {"w4a16-g32", experts}
    made = {}
    for name, steps in {"rounded": steps_of(model, chosen), "solved": solved.steps}.items():
        made[name] = folders / f"fit {experts} {name}"
        api.run(api.Recipe("fit", steps), origin, made[name], jobs=1)
    for server in (blackwell, vllm):
        plain, loaded = (server.load(made[name]) for name in ("rounded", "solved"))
        for one in (plain, loaded):
            assert_whole(one, "qwen3_moe", unwritten=UNWRITTEN)
        kinds = {name: found[:2] for name, found in plain.parameters.items()}
        assert {name: found[:2] for name, found in loaded.parameters.items()} == kinds
        assert loaded.schemes == plain.schemes
        changed = [n for n, found in loaded.parameters.items() if found != plain.parameters[n]]
        assert {number for number in (0, 1) if any(f".{number}.mlp." in n for n in changed)} == {
            0,
            1,
        }
