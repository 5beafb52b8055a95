"""The calibration engine against transformers: what it streams layer by layer is what the whole model
computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrate_models import (
    FAMILIES,
    HIDDEN,
    LAYERS,
    Kept,
    Make,
    meant,
    plan_of,
    qwen3_moe,
    samples,
    saved,
    whole,
)
from safetensors.torch import load_file, save_file

from qconvert.calibrate.engine import calibrate
from qconvert.calibrate.settings import LayerStats, Settings
from qconvert.core.int_scheme import IntScheme, Nvfp4Scheme, Scheme


class States(Kept):
    """Also keeps the hidden states after each layer."""

    def __init__(self, room: Path) -> None:
        super().__init__()
        self.room = room
        self.after: dict[int, torch.Tensor] = {}
        self.plain: dict[int, torch.Tensor] = {}

    def done(self, layer: int, stats: LayerStats) -> None:
        super().done(layer, stats)
        for into, name in ((self.after, "0.rows"), (self.plain, "plain.0.rows")):
            file = self.room / f"hidden.{layer + 1}.{name}"
            if file.exists():
                data = bytearray(file.read_bytes())
                into[layer] = torch.frombuffer(data, dtype=torch.bfloat16).view(-1, HIDDEN)


def streamed(folder: Path, tokens: list[Any], settings: Settings, room: Path) -> States:
    """Hidden states of the model as it is."""
    output = States(room)
    output.take(
        calibrate(plan_of(folder), tokens, (), settings, work_dir=room, memory=None, key="test")
    )
    return output


@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("attention", [pytest.param("eager", marks=pytest.mark.big), "sdpa"])
def test_streaming_is_the_whole_model_bit_for_bit(
    make: Make, attention: Any, tmp_path: Path
) -> None:
    folder = saved(make(), tmp_path / "model")
    tokens = [*samples(2, 40), *samples(1, 23, seed=5)]
    settings = Settings(attention=attention, min_tokens=1)
    ours = streamed(folder, tokens, settings, tmp_path / "room").after
    theirs = whole(folder, tokens, attention)
    sparse = [n for n in range(LAYERS) if n in ours]
    assert len(sparse) >= LAYERS - 1
    for number in sparse:
        assert torch.equal(ours[number], theirs[number]), number
        assert torch.isfinite(ours[number]).all()


SINGLE_PROCESS = Settings(min_tokens=1, propagated_error="ignore")
CORRECTED = Settings(min_tokens=1, propagated_error="correct")


@pytest.mark.parametrize(
    ("settings", "scheme"),
    [
        (SINGLE_PROCESS, IntScheme(4, 32)),
        (replace(SINGLE_PROCESS, signs="positive"), IntScheme(4, 32)),
        (Settings(min_tokens=1, solver="llmcompressor"), IntScheme(4, 32)),
        (CORRECTED, IntScheme(4, 32)),
        (SINGLE_PROCESS, Nvfp4Scheme("modelopt")),
        (CORRECTED, Nvfp4Scheme("compressed-tensors")),
    ],
    ids=[
        "best",
        "positive",
        "llmcompressor",
        "corrected",
        "modelopt",
        "compressed-tensors-corrected",
    ],
)
def test_what_goes_on_is_the_whole_model_with_those_codes(
    settings: Settings, scheme: Scheme, tmp_path: Path
) -> None:
    """Bit for bit: hidden states between layers are those of a model whose experts are what the codes
    mean, each a product in BF16; and beside them, where propagated errors are corrected, those of the
    model as it is."""
    folder = saved(qwen3_moe(num_hidden_layers=2), tmp_path / "model")
    tokens = [*samples(4, 40), *samples(1, 23, seed=5)]
    as_it_is = whole(folder, tokens, "sdpa") if settings.corrects else []
    output = States(tmp_path / "room")
    output.take(calibrate(
        plan_of(folder), tokens, [scheme], settings, work_dir=tmp_path / "room", memory=None, key="test",
    ))  # fmt: skip
    stored = load_file(folder / "model.safetensors")
    for (layer, expert, kind), (codes,) in output.made.items():
        name = f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight"
        assert stored[name].shape == codes.codes.shape
        stored[name] = meant(codes, scheme)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    for number, states in enumerate(whole(folder, tokens, "sdpa")):
        assert torch.equal(output.after[number], states), number
    assert output.plain.keys() == set(range(len(as_it_is)))
    for number, states in enumerate(as_it_is):
        assert torch.equal(output.plain[number], states), number
        assert not torch.equal(output.after[number], states)
