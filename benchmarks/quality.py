"""What codes of the same bytes lose: round to nearest, and `--gptq` by either solver.

    python benchmarks/quality.py [--seconds 280] [--model DIR] [--steps] [--peers] [--kt]
        [--real FOLDER|GGUF] [--fit] [--variants "as trained" heavy] [--schemes "W4A16 g128"]

Trains a small Qwen3-MoE (larger where there is a GPU; --model keeps it, and takes it up again),
calibrates it as `qconvert w4a16 --gptq`, `amx` and `nvfp4` do, and compares what it then answers with
what it answered before, on text held out: KL in nats a byte, its ratio to `--solver llmcompressor`
(NVFP4: to rounding) with the paired standard error over samples, perplexity a byte, and seconds. Three
forms of the model compute the same function, two of them with outlier channels. `--steps` adds the
refinements of `--solver best` one by one, and each left out, without what corrects propagated errors,
`--signs` searched scales with and without those below 0, `--peers` AutoRound and GPTQModel where they
are installed (quality_peers.py); `--kt` shows what kt-kernel's client answers instead (quality_kt.py);
`--real` compares what commands make of a published model (quality_real.py), `--fit` mixtures of formats
(quality_fit.py; --model is a folder of its models).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import quality_fit
import quality_kt
import quality_model
import quality_peers
import quality_real
import torch
import transformers

from qconvert.calibrate.backend import silence_llm_compressor, silence_transformers
from qconvert.calibrate.engine import calibrate
from qconvert.calibrate.settings import Matrix, Settings
from qconvert.calibrate.solve import rounded
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.int_scheme import Codes, IntScheme, Nvfp4Scheme, Scheme, Signs
from qconvert.formats.int_packed.search import search_rows
from qconvert.plan.plan import Plan

hf: Any = transformers
SCHEMES: dict[str, Scheme] = {
    "W4A16 g128": IntScheme(4, 128),
    "W4A16 g32": IntScheme(4, 32),
    "W4A16 g32 asymmetric": IntScheme(4, 32, symmetric=False),
    "AMXINT4": IntScheme(4, None, scale_dtype="F32", narrow=True),
    "NVFP4": Nvfp4Scheme("modelopt"),
}
THEIRS = Settings(solver="llmcompressor")
ALONE = Settings(propagated_error="ignore")


@dataclass(frozen=True)
class Way:
    """How codes are found: by a calibration, or by rounding, `searched` with scales that `w4a16 --rtn
    --scales search` would take."""

    settings: Settings
    calibrated: bool = True
    searched: Signs | None = None


SOLVERS = {  # the first is what others are compared with
    "--solver llmcompressor": Way(THEIRS),
    "round to nearest": Way(replace(THEIRS, search="none"), calibrated=False),
    "--solver best": Way(Settings()),
    "--propagated-error ignore": Way(ALONE),
}
OF_NVFP4 = {
    "round to nearest": Way(Settings(scales="amax"), calibrated=False),
    "--scales search": Way(Settings(), calibrated=False),
    "--gptq": Way(Settings()),
    "--propagated-error ignore": Way(ALONE),
}
# Of symmetric INT4 alone: scales that are searched for, above 0 and of either sign.
SIGNS = {
    "--signs positive": Way(Settings(signs="positive")),
    "rtn searched, positive": Way(THEIRS, calibrated=False, searched="positive"),
    "rtn searched": Way(THEIRS, calibrated=False, searched="both"),
}
# The refinements one after the other, then each of them alone left out.
STEPS = {
    "scales searched": Way(replace(ALONE, order="stored", refit=0, descent=0)),
    "+ order": Way(replace(ALONE, refit=0, descent=0)),
    "+ refit: --descent 0": Way(replace(ALONE, descent=0)),
    "--refit 0": Way(replace(ALONE, refit=0)),
    "--order stored": Way(replace(ALONE, order="stored")),
    "--scales amax": Way(replace(ALONE, scales="amax")),
}
STEPS_OF_NVFP4 = {
    "scales of amax": Way(replace(ALONE, scales="amax", order="stored", refit=0, descent=0)),
    "scales in the loop": Way(replace(ALONE, order="stored", refit=0, descent=0)),
    "+ order": Way(replace(ALONE, refit=0, descent=0)),
    "--refit 0": Way(replace(ALONE, refit=0)),
    "--descent 0": Way(replace(ALONE, descent=0)),
    "--order stored": Way(replace(ALONE, order="stored")),
    "--scales amax": Way(replace(ALONE, scales="amax")),
    "--refit 4 --descent 4": Way(replace(ALONE, refit=4, descent=4)),
}


@dataclass(frozen=True)
class Answers:
    """A model's log probabilities [S, T, V] of held-out samples int64 [S, T]."""

    tokens: torch.Tensor
    logs: torch.Tensor

    def perplexity(self) -> float:
        """A byte."""
        picked = self.logs[:, :-1].gather(2, self.tokens[:, 1:, None])
        return float(torch.exp(-picked.mean()))

    def divergence(self, other: Answers) -> torch.Tensor:
        """KL of the other from this, by sample."""
        return (self.logs.exp() * (self.logs - other.logs)).sum(-1).mean(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=280.0, help="of training")
    parser.add_argument(
        "--model", type=Path, help="folder of a model trained before, or to be kept"
    )
    parser.add_argument("--samples", type=int, help="to calibrate on: 128; of --real 32")
    parser.add_argument("--held-out", type=int, help="samples: 1024; of --real 32")
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--signs", action="store_true")
    parser.add_argument("--peers", action="store_true", help="those of quality_peers.py")
    parser.add_argument("--kt", action="store_true", help="kt-kernel's client instead")
    parser.add_argument("--real", type=Path, help="a published model instead, a folder or GGUF")
    parser.add_argument("--fit", action="store_true", help="mixtures of formats instead")
    parser.add_argument("--ways", nargs="+", choices=list(quality_real.WAYS), help="of --real")
    parser.add_argument("--variants", nargs="+", default=quality_model.VARIANTS)
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    asked = parser.parse_args()
    silence_llm_compressor()
    silence_transformers()
    if asked.fit:
        with tempfile.TemporaryDirectory(prefix="qconvert-quality-") as where:
            quality_fit.compare(asked.model, Path(where), asked.seconds, asked.held_out or 128)
        return
    if asked.real is not None:
        with tempfile.TemporaryDirectory(prefix="qconvert-quality-") as where:
            quality_real.compare(
                asked.real, Path(where), samples=asked.samples or 32, length=256,
                held_out=asked.held_out or 32, ways=asked.ways or (), peers=asked.peers,
            )  # fmt: skip
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = quality_model.LARGE if device == "cuda" else quality_model.SMALL
    train, held = quality_model.corpus(size.corpus)
    tokens = quality_model.samples_of(train, asked.samples or 128, size.length, 1)
    test = quality_model.samples_of(held, asked.held_out or 1024, size.length, 3)
    with tempfile.TemporaryDirectory(prefix="qconvert-quality-") as where:
        folder = asked.model or Path(where) / "model"
        if not (folder / "config.json").exists():
            steps, loss = quality_model.trained(size, asked.seconds, device, folder)
            print(
                f"trained {steps} steps on {device}: held-out cross entropy {loss:.3f} nats a byte"
            )
        for kind in asked.variants:
            changed = _loaded(folder, torch.bfloat16)
            kurtosis = quality_model.variant(changed, kind)
            own = Path(where) / kind.replace(" ", "-")
            changed.save_pretrained(own)
            print(f"\n{kind}: kurtosis of a gate_up matrix {kurtosis:.1f}")
            if asked.kt:
                quality_kt.compare(own, tokens, test[:4])
                continue
            ways = {name: _ways(SCHEMES[name], asked) for name in asked.schemes}
            _compare(own, tokens, test, device, ways)


def _loaded(folder: Path, dtype: torch.dtype) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def _compare(
    folder: Path, tokens: torch.Tensor, test: torch.Tensor, device: str,
    ways: Mapping[str, Mapping[str, Way | Peer]],
) -> None:  # fmt: skip
    """`ways` by scheme; what the others are compared with is the first."""
    model = _loaded(folder, torch.float32).to(device)
    before = _answers(model, test)
    print(f"  BF16: perplexity {before.perplexity():.4f}", flush=True)
    weights = {
        name: p.detach().clone() for name, p in model.named_parameters() if "experts" in name
    }
    for name, asked in ways.items():
        base: torch.Tensor | None = None
        for label, way in asked.items():
            start = time.monotonic()
            seconds: float | None = None
            if not isinstance(way, Way):
                seconds = way(model, folder, tokens, device)
                if seconds is None:
                    print(f"  {name:20} {label:24} not installed", flush=True)
                    continue
            elif way.calibrated:
                _calibrated(model, folder, tokens, SCHEMES[name], way.settings, device)
            else:
                _round(model, SCHEMES[name], way)
            if seconds is None:
                seconds = time.monotonic() - start
            after = _answers(model, test)
            lost = before.divergence(after)
            base = lost if base is None else base
            ratio = float(lost.mean() / base.mean())
            error = float((lost - ratio * base).std() / base.mean() / len(base) ** 0.5)
            print(
                f"  {name:20} {label:24} KL {float(lost.mean()):.5f}  ratio {ratio:.3f} +- {error:.3f}"
                f"  perplexity {after.perplexity():.4f}  {seconds:6.1f} s",
                flush=True,
            )
            for key, value in weights.items():
                model.get_parameter(key).data.copy_(value)


# The seconds of another project's solver, whose weights the model then has; None: not installed.
Peer = Callable[[Any, Path, torch.Tensor, str], float | None]


def _ways(scheme: Scheme, asked: argparse.Namespace) -> dict[str, Way | Peer]:
    if isinstance(scheme, Nvfp4Scheme):
        return {**OF_NVFP4, **(STEPS_OF_NVFP4 if asked.steps else {})}
    found: dict[str, Way | Peer] = {**SOLVERS, **(STEPS if asked.steps else {})}
    if asked.signs and scheme.gains_by_signs:
        found.update(SIGNS)
    if asked.peers and scheme.symmetric and scheme.group is not None:
        found.update({name: _peer(name, scheme.group) for name in quality_peers.PEERS})
    return found


def _peer(name: str, group_size: int) -> Peer:
    def replaced(model: Any, folder: Path, tokens: torch.Tensor, device: str) -> float | None:
        done = quality_peers.run(name, folder, tokens, group_size, device)
        if done is None:
            return None
        wanted = [
            (layer, expert, kind)
            for layer, block in enumerate(model.model.layers)
            for expert in range(block.mlp.experts.gate_up_proj.shape[0])
            for kind in ("gate_proj", "up_proj", "down_proj")
        ]
        if len(wanted) != len(done.weights):
            raise ValueError(f"{name}: {len(wanted)} matrices wanted, found {len(done.weights)}")
        for layer, expert, kind in wanted:
            key = f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight"
            _expert(model, layer, expert, kind).copy_(done.weights[key])
        return done.seconds

    return replaced


@torch.no_grad()
def _answers(model: Any, tokens: torch.Tensor) -> Answers:
    device = next(model.parameters()).device
    parts = [tokens[start : start + 8] for start in range(0, len(tokens), 8)]
    logs = [model(part.to(device)).logits.log_softmax(-1).cpu() for part in parts]
    return Answers(tokens, torch.cat(logs))


def _calibrated(
    model: Any,
    folder: Path,
    tokens: torch.Tensor,
    scheme: Scheme,
    settings: Settings,
    device: str,
) -> None:
    """Replace a model's experts by what a calibration's codes mean."""
    plan = Plan.identity(Checkpoint.open(folder))
    samples = [sample.numpy() for sample in tokens]
    with tempfile.TemporaryDirectory(prefix="qconvert-quality-") as where:
        for event in calibrate(
            plan, samples, [scheme], settings, work_dir=Path(where) / "work", memory=None,
            device="cuda:0" if device == "cuda" else "cpu", key="quality",
        ):  # fmt: skip
            if isinstance(event, Matrix):
                assert event.expert is not None, "linears beside experts were not asked for"
                meaning = _meaning(event.codes[0])
                _expert(model, event.layer, event.expert, event.kind).copy_(meaning)


def _round(model: Any, scheme: Scheme, way: Way) -> None:
    """As `--rtn` does."""
    for block in model.model.layers:
        experts = block.mlp.experts
        for expert in range(experts.gate_up_proj.shape[0]):
            for weight in (experts.gate_up_proj.data[expert], experts.down_proj.data[expert]):
                given = weight.bfloat16().cpu()
                if way.searched is None:
                    weight.copy_(rounded(given, scheme, way.settings).weight.float())
                else:
                    assert isinstance(scheme, IntScheme)
                    weight.copy_(_meaning(_searched(given, scheme, way.searched)))


def _searched(weight: torch.Tensor, scheme: IntScheme, signs: Signs) -> Codes:
    """A BF16 matrix rounded under scales that are searched for."""
    shape = tuple(weight.shape)
    scale = np.empty((shape[0], scheme.groups(shape[1])), np.float32)
    codes, zero = np.empty(shape, np.int8), np.zeros(scale.shape, np.int8)
    values, spare, third = (np.empty(shape, dtype) for dtype in ("<f4", "<i4", "<f4"))
    bits = weight.view(torch.int16).numpy().view(np.uint16)
    both = signs == "both"
    search_rows(bits, values, spare, third, scheme, codes, scale, zero, signed=both)
    return Codes(codes, scale)


def _expert(model: Any, layer: int, expert: int, kind: str) -> torch.Tensor:
    """A view of one expert's matrix [N, K]."""
    experts = model.model.layers[layer].mlp.experts
    if kind == "down_proj":
        found: torch.Tensor = experts.down_proj.data[expert]
        return found
    half = experts.gate_up_proj.shape[1] // 2
    both: torch.Tensor = experts.gate_up_proj.data[expert]
    return both[:half] if kind == "gate_proj" else both[half:]


def _meaning(codes: Codes) -> torch.Tensor:
    """What codes mean, as runtimes compute it: BF16 [N, K]."""
    width = codes.codes.shape[1] // codes.scale.shape[1]
    steps = torch.from_numpy(codes.codes).float()
    if codes.zero is not None:
        steps -= torch.from_numpy(codes.zero).float().repeat_interleave(width, 1)
    scale = torch.from_numpy(codes.scale)
    if codes.global_scale is not None:  # of modelopt's NVFP4, whose codes are twice their numbers
        steps, scale = steps / 2, scale * codes.global_scale
    wide = steps * scale.repeat_interleave(width, 1)
    return wide.bfloat16().float()


if __name__ == "__main__":
    main()
