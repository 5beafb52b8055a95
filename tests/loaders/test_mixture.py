"""Mixtures in the runtimes' own loaders: each group of the config finds its modules, and what the
simulator says of parts that it knows is what the loader does."""

from __future__ import annotations

from pathlib import Path

import pytest

from loaders.agree_classes import of_model
from loaders.client import PYTHON, Server

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(
        not (PYTHON.parent.parent / "vllm").is_dir(), reason="needs the loaders: make loaders"
    ),
]

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
