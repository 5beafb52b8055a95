"""The calibration engine against llm-compressor's `oneshot`: the same model, data and settings give the
same codes and scales. Installed by `make peers`; run with `pytest -m peer tests/test_calibrate_peer.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from calibrate_models import Kept, calibrated, hf, qwen3, qwen3_moe, qwen3_next, samples, saved
from sampled import thinned

from qconvert.calibrate import model as calibrate_model
from qconvert.calibrate.settings import Settings
from qconvert.core.int_scheme import IntScheme

pytestmark = pytest.mark.peer

COUNT, LENGTH = 12, 48


def _tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    inner = Tokenizer(WordLevel({f"t{n}": n for n in range(300)}, unk_token="t0"))
    made = hf.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="t0", eos_token="t2")
    made.save_pretrained(folder)
    return made


EXPERTS = r"re:.*\.mlp\.experts\..*_proj$"


def oneshot_weights(
    folder: Path, tokens: list[Any], scheme: IntScheme, *, every: bool,
    targets: Sequence[str] = (EXPERTS,), ignore: Sequence[str] = (),
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Codes of what is targeted as llm-compressor's compressor stores them, by name, and scales."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor.entrypoints.oneshot import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    rows = [sample.tolist() for sample in tokens]
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(r) for r in rows]})
    strategy = {"strategy": "channel"} if scheme.group is None else {
        "strategy": "group", "group_size": scheme.group}  # fmt: skip
    args = QuantizationArgs(
        num_bits=scheme.bits, symmetric=scheme.symmetric, actorder=scheme.actorder, **strategy
    )
    recipe = GPTQModifier(
        config_groups={"group_0": QuantizationScheme(targets=list(targets), weights=args)},
        ignore=list(ignore),
        actorder=scheme.actorder,
    )
    oneshot(
        model=model, dataset=data, recipe=recipe, processor=_tokenizer(folder),
        num_calibration_samples=len(tokens), max_seq_length=LENGTH, batch_size=1,
        shuffle_calibration_samples=False, moe_calibrate_all_experts=every,
    )  # fmt: skip
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if not hasattr(module, "weight_scale"):
            continue
        zero = module.weight_zero_point if hasattr(module, "weight_zero_point") else None
        found[name] = _codes(module.weight.data, module.weight_scale.data, zero, args)
        found[f"{name}.scale"] = module.weight_scale.data.float()
    return found


def _codes(weight: torch.Tensor, scale: torch.Tensor, zero: Any, args: Any) -> torch.Tensor:
    """The codes that these weights are multiples of scales by. Of 4-bit ones they are what
    compressed-tensors packs; of 8-bit ones it loses some by dividing in BF16."""
    from compressed_tensors.quantization.lifecycle.forward import quantize

    zeros = None if args.symmetric else zero
    made: torch.Tensor = quantize(weight.float(), scale.float(), zeros, args, dtype=torch.int8)
    if args.num_bits == 4:
        assert torch.equal(made, quantize(weight, scale, zeros, args, dtype=torch.int8))
    return made


def differing(kept: Kept, theirs: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Codes that differ, and codes there are."""
    wrong = total = 0
    for (layer, expert, kind), (codes,) in kept.made.items():
        name = f"model.layers.{layer}.mlp.experts.{expert}.{kind}"
        assert codes.codes.shape == theirs[name].shape
        wrong += int(np.count_nonzero(codes.codes != theirs[name].numpy()))
        total += codes.codes.size
        scale = theirs[f"{name}.scale"].numpy().reshape(codes.scale.shape)
        assert np.array_equal(codes.scale, scale), name
    assert len(theirs) == 2 * len(kept.made)
    return wrong, total


def ours(folder: Path, tokens: list[Any], scheme: IntScheme, room: Path, *, every: bool) -> Kept:
    mode: Literal["all", "routed"] = "all" if every else "routed"
    settings = Settings(attention="eager", min_tokens=1, experts=mode, solver="llmcompressor")
    kept = calibrated(folder, room, tokens, [scheme], settings)
    assert not any(stats.few for stats in kept.stats.values())
    return kept


SCHEMES = {
    "g32": IntScheme(4, 32),
    "g64 static": IntScheme(4, 64, actorder="static"),
    "int8 channel": IntScheme(8, None),
    "g32 asymmetric": IntScheme(4, 32, symmetric=False),
}


@pytest.mark.parametrize(("name", "every"), thinned(itertools.product(SCHEMES, [False, True]), 3))
def test_qwen3_next_code_for_code(name: str, every: bool, tmp_path: Path) -> None:
    scheme = SCHEMES[name]
    folder = saved(qwen3_next(), tmp_path / "model")
    tokens = samples(COUNT, LENGTH)
    kept = ours(folder, tokens, scheme, tmp_path / "room", every=every)
    wrong, total = differing(kept, oneshot_weights(folder, tokens, scheme, every=every))
    print(f"{wrong} of {total} codes differ")
    assert total == 4 * 8 * 3 * 128 * 128
    assert wrong == 0


@pytest.mark.parametrize("every", [False, True], ids=["routed", "all"])
def test_qwen3_moe_with_its_lost_mask(
    every: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneshot's sequential pipeline hands Qwen3-MoE no mask under eager attention, so every token sees
    those after it. With that imitated the codes are the same; without it they are not."""
    folder = saved(qwen3_moe(), tmp_path / "model")
    tokens = samples(COUNT, LENGTH)
    scheme = IntScheme(4, 32)
    theirs = oneshot_weights(folder, tokens, scheme, every=every)
    causal = ours(folder, tokens, scheme, tmp_path / "causal", every=every)
    assert differing(causal, theirs)[0] > 0
    real = calibrate_model.Model.calls

    def without_mask(self: Any, *asked: Any) -> list[Any]:
        found = real(self, *asked)
        return [replace(one, named={**one.named, "attention_mask": None}) for one in found]

    monkeypatch.setattr(calibrate_model.Model, "calls", without_mask)
    kept = ours(folder, tokens, scheme, tmp_path / "room", every=every)
    wrong, total = differing(kept, theirs)
    print(f"{wrong} of {total} codes differ")
    assert wrong == 0


def test_the_scales_of_its_kv_cache(tmp_path: Path) -> None:
    """Its own are BF16 (8 bits), of all samples with this observer: its default averages over them."""
    from datasets import Dataset
    from llmcompressor.entrypoints.oneshot import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    folder = saved(qwen3(), tmp_path / "model")
    tokens = samples(3, LENGTH)
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    rows = [sample.tolist() for sample in tokens]
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * LENGTH] * len(rows)})
    scheme = {
        "num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True,
        "observer": "static_minmax",
    }  # fmt: skip
    oneshot(
        model=model, dataset=data, recipe=QuantizationModifier(kv_cache_scheme=scheme),
        processor=_tokenizer(tmp_path / "tokenizer"), num_calibration_samples=len(tokens),
        max_seq_length=LENGTH, batch_size=1, shuffle_calibration_samples=False,
    )  # fmt: skip
    modules = {number: f"model.layers.{number}.self_attn" for number in range(2)}
    kept = calibrated(folder, tmp_path / "room", tokens, [], Settings(), caches=modules)
    for number, attention in enumerate(layer.self_attn for layer in model.model.layers):
        (codes,) = kept.linears[modules[number]]
        theirs = [float(attention.k_scale), float(attention.v_scale)]
        assert (codes.scale.ravel() / 448).tolist() == pytest.approx(theirs, rel=2**-8)
