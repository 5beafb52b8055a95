"""`--kv-scale calibrated`: what a layer's attention puts into transformers' own cache, and what
llm-compressor finds on the same samples, over E4M3's largest number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import calibrate_models as small
import numpy as np
import pytest
import torch
from calibrate_models import hf
from checkpoints import ran, read_tensors, refused, run_cli
from made_once import made_once
from safetensors.torch import save_file
from sampled import sampled

from qconvert import api
from qconvert.calibrate.kv_cache import CacheMaxima, joined_maxima
from qconvert.core.errors import PlanError, RunError
from qconvert.layouts.derived.running import Call
from qconvert.passes.kv_scale import KvScale
from qconvert.samples.request import Calibration

SAMPLES, LENGTH = small.samples(3, 24), 24
GPTQ = ("w4a16", "--gptq", "--group-size", "32", "--targets", "Linear")


def source(make: str) -> tuple[Path, Path]:
    """A model of that class, and samples for it."""

    def write(folder: Path) -> None:
        small.saved(getattr(small, make)(), folder / "model")
        ids = {"input_ids": torch.from_numpy(np.stack(SAMPLES))}
        save_file(ids, folder / "samples.safetensors")

    folder = made_once(f"kv-{make}", write)
    return folder / "model", folder / "samples.safetensors"


def quantized(make: str, out: Path, *words: str) -> Path:
    folder, data = source(make)
    ran(
        words[0], folder, out, *words[1:], "--kv-scale", "calibrated", "--data", str(data),
        "--samples", "3", "--length", "24", "--device", "cpu", "--jobs", "1",
    )  # fmt: skip
    return out


def scales(folder: Path) -> dict[tuple[int, str], float]:
    """Scales by layer and which."""
    return {
        (int(name.split(".")[2]), name[-7]): float(np.frombuffer(one.data, "<f4")[0])
        for name, one in read_tensors(folder).items() if name.endswith((".k_scale", ".v_scale"))
    }  # fmt: skip


def cached(folder: Path) -> dict[tuple[int, str], float]:
    """The largest number that transformers caches of any sample, as a scale."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    found: dict[tuple[int, str], float] = {}
    for sample in SAMPLES:
        with torch.no_grad():
            cache: Any = model(torch.from_numpy(sample)[None], use_cache=True).past_key_values
        for number, layer in enumerate(cache.layers):
            for which, rows in (("k", "keys"), ("v", "values")):
                if (held := getattr(layer, rows, None)) is not None:
                    largest = np.float32(held.abs().max().item()) / np.float32(448)
                    found[number, which] = max(found.get((number, which), 0.0), float(largest))
    return found


@pytest.mark.parametrize("make", sampled(["qwen3", "qwen3_5_moe", "glm4_moe", "llama"], 2))
def test_of_the_model_as_it_was(make: str, tmp_path: Path) -> None:
    out = quantized(make, tmp_path / "out", "fp8", "--channel")
    wanted = cached(source(make)[0])
    assert wanted
    assert scales(out) == wanted
    assert api.open_checkpoint(out).manifest["kv_scale"] == "calibrated"  # type: ignore[index]
    report = run_cli(
        "validate", out, "--against", source(make)[0], "--level", "full", "--jobs", "1"
    )
    assert report.code == 0, report.out


@pytest.mark.parametrize("make", sampled(["qwen3", "qwen3_moe"], 2))
def test_of_the_model_as_it_is_served(make: str, tmp_path: Path) -> None:
    out = quantized(make, tmp_path / "out", *GPTQ)
    ran("dequant", out, tmp_path / "back", "--jobs", "1")
    assert scales(out) == cached(tmp_path / "back")
    assert scales(out) != cached(source(make)[0])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("fp8",), "a calibration needs --data FILE"),
        (("fp8", "--kv-scale", "1", "--samples", "3"), "--samples needs --kv-scale calibrated"),
        (("w4a16", "--rtn", "--data", "x.jsonl"), "--data needs --gptq"),
    ],
)  # fmt: skip
def test_calls_that_are_refused(words: tuple[str, ...], why: str, tmp_path: Path) -> None:
    kv = () if "--kv-scale" in words else ("--kv-scale", "calibrated")
    kv = () if "--rtn" in words else kv
    done = run_cli(words[0], source("qwen3")[0], tmp_path / "out", *words[1:], *kv)
    assert done.code == 2
    assert why in done.err


def test_latent_attention_has_no_scale_but_one(tmp_path: Path) -> None:
    model = small.saved(small.deepseek_v3(num_hidden_layers=2), tmp_path / "model")
    for value in ("calibrated", "0.5"):
        more = ("--synthetic",) if value == "calibrated" else ()
        said = refused("fp8", model, tmp_path / "out", "--kv-scale", value, *more)
        assert "latent attention" in said


def test_what_is_no_cache_is_refused() -> None:
    seen = CacheMaxima("model.layers.0.self_attn")
    with pytest.raises(RunError, match="without past_key_values"):
        seen.watched(Call((), {}))
    with pytest.raises(RunError, match="are not kept"):
        joined_maxima(0, seen.module, [seen.found])
    both = joined_maxima(0, seen.module, [(1, 2.0, 3.0), (1, 4.0, 1.0), (0, 0.0, 0.0)])
    assert both.codes[0].scale.tolist() == [[4.0], [3.0]]
    with pytest.raises(RunError, match="not finite"):
        joined_maxima(0, seen.module, [(1, float("inf"), 3.0)])
    with pytest.raises(PlanError, match="leave calibrate out"):
        KvScale(1.0, Calibration(synthetic=True))
