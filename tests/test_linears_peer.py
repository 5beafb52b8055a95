"""Linears beside routed experts against llm-compressor's `oneshot`: the same model, data and settings
give the same codes and scales, of dense models, and of attention, shared experts and experts together.

Run with `pytest -m peer tests/test_linears_peer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibrate_models import Kept, calibrated, llama, plan_of, qwen3_moe, qwen3_next, samples, saved
from test_calibrate_peer import EXPERTS, oneshot_weights

from qconvert.calibrate import model as calibrate_model
from qconvert.calibrate.settings import Settings
from qconvert.core.int_scheme import IntScheme
from qconvert.models.linears import quantizable

pytestmark = pytest.mark.peer

COUNT, LENGTH = 12, 48
SCHEMES = {
    "g32": IntScheme(4, 32),
    "g64 static": IntScheme(4, 64, actorder="static"),
    "int8 channel": IntScheme(8, None),
    "g32 asymmetric": IntScheme(4, 32, symmetric=False),
}


def linears_in(folder: Path) -> list[str]:
    """All that runtimes load quantized beside the routed experts."""
    return [module for module, kind in quantizable(plan_of(folder), ()) if not kind.routed]


def ours(
    folder: Path, tokens: Sequence[Any], scheme: IntScheme, room: Path, *, experts: bool
) -> Kept:
    settings = Settings(attention="eager", min_tokens=1, solver="llmcompressor")
    asked = dict.fromkeys(linears_in(folder), (scheme,))
    return calibrated(
        folder, room, tokens, [scheme] if experts else [], settings, linears=asked, statistics=False
    )


def by_name(kept: Kept) -> dict[str, Any]:
    found = {name: codes for name, (codes,) in kept.linears.items()}
    for (layer, expert, kind), (codes,) in kept.made.items():
        found[f"model.layers.{layer}.mlp.experts.{expert}.{kind}"] = codes
    return found


def differing(kept: Kept, theirs: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Codes that differ, and codes there are; no matrix is missing on a side, and scales are equal."""
    mine = by_name(kept)
    assert {name for name in theirs if not name.endswith(".scale")} == mine.keys()
    wrong = total = 0
    for name, codes in mine.items():
        scale = theirs[f"{name}.scale"].numpy().reshape(codes.scale.shape)
        assert np.array_equal(codes.scale, scale), name
        wrong += int(np.count_nonzero(codes.codes != theirs[name].numpy()))
        total += codes.codes.size
    return wrong, total


def without_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """What oneshot's sequential pipeline hands layers: no mask, so every token sees those after it."""
    real = calibrate_model.Model.calls

    def calls(self: Any, *asked: Any) -> list[Any]:
        found = real(self, *asked)
        return [replace(one, named={**one.named, "attention_mask": None}) for one in found]

    monkeypatch.setattr(calibrate_model.Model, "calls", calls)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_dense_code_for_code(
    scheme: IntScheme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(llama(), tmp_path / "model")
    tokens = samples(COUNT, LENGTH)
    theirs = oneshot_weights(
        folder, tokens, scheme, every=False, targets=["Linear"], ignore=["lm_head"]
    )
    kept = ours(folder, tokens, scheme, tmp_path / "room", experts=False)
    wrong, total = differing(kept, theirs)
    print(f"{wrong} of {total} codes differ")
    assert len(kept.linears) == 2 * 7
    assert wrong == 0


def test_attention_shared_experts_and_experts_code_for_code(tmp_path: Path) -> None:
    """Linear attention, attention, shared experts and routed ones of one layer, all from its forward
    before any of them was quantized."""
    folder = saved(qwen3_next(), tmp_path / "model")
    tokens, scheme = samples(COUNT, LENGTH), IntScheme(4, 32)
    theirs = oneshot_weights(
        folder, tokens, scheme, every=False, targets=[*linears_in(folder), EXPERTS]
    )
    kept = ours(folder, tokens, scheme, tmp_path / "room", experts=True)
    wrong, total = differing(kept, theirs)
    print(f"{wrong} of {total} codes differ")
    assert len(kept.linears) == 3 * 1 + 4 + 4 * 3
    assert len(kept.made) == 4 * 8 * 3
    assert wrong == 0


@pytest.mark.parametrize("experts", [True, False])
def test_qwen3_moe_with_its_lost_mask(
    experts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in test_calibrate_peer: `Linear` with all but routers and the head, and attention alone beside
    experts that stay."""
    folder = saved(qwen3_moe(), tmp_path / "model")
    tokens, scheme = samples(COUNT, LENGTH), IntScheme(4, 32)
    ignore = ["lm_head", "re:.*mlp.gate$", *([] if experts else [EXPERTS])]
    theirs = oneshot_weights(folder, tokens, scheme, every=False, targets=["Linear"], ignore=ignore)
    without_mask(monkeypatch)
    kept = ours(folder, tokens, scheme, tmp_path / "room", experts=experts)
    wrong, total = differing(kept, theirs)
    print(f"{wrong} of {total} codes differ")
    assert len(kept.linears) == 4 * 4
    assert wrong == 0
