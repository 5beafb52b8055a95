"""Choices of `qconvert fit` for small trained models, for `quality.py --fit`: beside the best uniform
format of no more bits, and beside what AutoRound's AutoScheme chooses of the same formats, on the same
samples, at the same bytes.

    python benchmarks/quality.py --fit [--model DIR] [--seconds 280] [--held-out 128]
    PYTHONPATH=DIR python benchmarks/quality.py --fit   # with another AutoRound than is installed

Three models: a Qwen3-MoE as it was trained, the same function with outlier channels, and a dense Qwen3.
KL is in nats a byte, on text held out; what predictions are compared with is that of the samples that
were chosen by. Codes are rounded to nearest, or calibrated, each by its project: `fit` without --rtn,
and AutoRound's 200 iterations for what AutoScheme chose. Both choose for groups that a runtime loads as
one. Seconds are those of finding a choice, in processes with a thread each.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import quality_model
import torch
import transformers
from quality_peers import byte_tokenizer
from safetensors.torch import load_file, save_file

from qconvert import api
from qconvert.fit.fitting import Fitting
from qconvert.fit.groups import STAY, Group, solved_steps, steps_of

hf: Any = transformers
BITS = (4.25, 4.51, 5.0, 6.0)
TUNED = (4.51,)  # budgets for which AutoRound tunes what AutoScheme chose, minutes each
SAMPLES, LENGTH = 32, 128
# Formats that AutoScheme knows, too: bits, columns of a group.
SHARED = {"w8a16": (8, 128), "w4a16-g32": (4, 32), "w4a16-g64": (4, 64), "w4a16-g128": (4, 128)}
# Modules that runtimes load as one, as AutoScheme is told of them.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), (r"mlp\.gate_proj", r"mlp\.up_proj"))
_AUTOSCHEME = "auto_round.auto_scheme.gen_auto_scheme"


@dataclass(frozen=True)
class Place:
    """A model, and where its samples and results are."""

    model: Path
    room: Path

    @property
    def chosen_by(self) -> Path:
        return self.room / "calibration.jsonl"

    @property
    def held(self) -> Path:
        return self.room / "held.jsonl"

    def fitting(self, formats: Sequence[str] = (), *, rtn: bool) -> Fitting:
        return api.fitting(
            self.model, self.chosen_by, formats=formats, rtn=rtn, samples=SAMPLES, length=LENGTH,
            devices=["cpu"], work_dir=self.room / "measured",
        )  # fmt: skip


def compare(given: Path | None, work: Path, seconds: float, held_out: int) -> None:
    """Print a table for each model; `given` keeps the models."""
    torch.set_num_threads(1)
    train, held = quality_model.corpus(quality_model.MOE.corpus)
    for name, model in _models(given or work / "models", seconds).items():
        at = Place(model, work / name)
        at.room.mkdir()
        for file, text, count, seed in (
            (
                at.chosen_by,
                train,
                9 * SAMPLES,
                1,
            ),  # the first to measure with, others to calibrate on
            (at.held, held, held_out, 3),
        ):
            rows = quality_model.samples_of(text, count, LENGTH, seed).tolist()
            file.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
        print(f"\n{name}", flush=True)
        for rtn in (True, False):
            _budgets(at, held_out, rtn=rtn)
        _beside_autoscheme(at, held_out)


def _models(folder: Path, seconds: float) -> dict[str, Path]:
    sizes = {"moe": quality_model.MOE, "dense": quality_model.DENSE}
    for name, size in sizes.items():
        if not (folder / name / "config.json").exists():
            steps, loss = quality_model.trained(size, seconds, "cpu", folder / name)
            print(f"trained {name}: {steps} steps, held-out cross entropy {loss:.3f} nats a byte")
    outliers = folder / "moe-outliers"
    if not outliers.exists():
        changed = hf.AutoModelForCausalLM.from_pretrained(folder / "moe", dtype=torch.bfloat16)
        print(f"outliers: kurtosis {quality_model.variant(changed, 'heavy'):.1f}")
        changed.save_pretrained(outliers)
    return {
        "MoE": folder / "moe", "MoE with outliers": outliers, "dense": folder / "dense"
    }  # fmt: skip


def _budgets(at: Place, held_out: int, *, rtn: bool) -> None:
    """Of all formats: choices, and uniform ones; codes rounded, or calibrated where they can be."""
    start = time.monotonic()
    fitting = at.fitting(rtn=rtn)
    fitting.measured()
    codes = "rounded" if rtn else "calibrated"
    print(f"  {codes}: measured in {time.monotonic() - start:.0f} s", flush=True)
    found = {bits: fitting.fit(api.Budget(bits=bits)) for bits in BITS}
    uniform = next(iter(found.values())).uniform
    folders: dict[str, Path] = {}
    for form in uniform:
        every = _all_in(fitting, form.form)
        steps = steps_of(fitting.model, every)
        if not rtn:
            steps = solved_steps(fitting.model, every, fitting.calibration).steps
        folders[form.form] = _made(at, steps, f"{codes} {form.form}")
    for bits, one in found.items():
        folders[f"{bits}"] = _made(at, one.steps, f"{codes} {bits}")
    kl = _kl(at, folders, held_out)
    for form in uniform:
        print(f"  {form.form:12} {form.bits:.3f} bits  KL {kl[form.form]:.3g}", flush=True)
    for bits, one in found.items():
        best = min((o for o in uniform if o.bits <= bits), key=lambda o: kl[o.form])
        print(
            f"  fit {bits:<5} {one.bits:.3f} bits  KL {kl[f'{bits}']:.3g}, "
            f"{kl[f'{bits}'] / kl[best.form]:.2f} of {best.form}  predicted/measured "
            f"{one.predicted / one.measured:.2f}",
            flush=True,
        )


def _beside_autoscheme(at: Place, held_out: int) -> None:
    """Of the formats of both, at the bytes of what AutoScheme chooses."""
    if find_spec("auto_round") is None:
        print("  AutoScheme: not installed")
        return
    start = time.monotonic()
    fitting = at.fitting(tuple(SHARED), rtn=True)
    fitting.measured()
    took = time.monotonic() - start
    for bits in BITS:
        theirs = autoscheme(at, bits, 200 if bits in TUNED else 0)
        numbers = _numbers(fitting, theirs.layers)
        nbytes = sum(sizes[n] for sizes, n in zip(fitting.choices.nbytes, numbers, strict=True))
        start = time.monotonic()
        held = 8 * nbytes / fitting.model.weights
        ours = fitting.fit(api.Budget(bits=held))
        took += time.monotonic() - start
        chosen = _by_form(fitting, numbers)
        folders = {
            "theirs": _made(at, steps_of(fitting.model, chosen), f"theirs {bits}"),
            "ours": _made(at, steps_of(fitting.model, ours.chosen), f"ours {bits}"),
        }
        if bits in TUNED:
            solved = at.fitting(tuple(SHARED), rtn=False).fit(api.Budget(bits=held))
            folders["calibrated"] = _made(at, solved.steps, f"ours {bits} calibrated")
            folders["tuned"] = _with(at, theirs.tuned, f"theirs {bits} tuned")
        kl = _kl(at, folders, held_out)
        print(
            f"  AutoScheme {theirs.version} of {bits}: {held:.3f} bits in {theirs.seconds:.0f} s, KL "
            f"{kl['theirs']:.3g}; fit {ours.bits:.3f} bits in {took:.0f} s, {kl['ours']:.3g}, "
            f"{kl['ours'] / kl['theirs']:.2f} of it",
            flush=True,
        )
        if bits in TUNED:
            print(
                f"    tuned by AutoRound {kl['tuned']:.3g}; fit calibrated {kl['calibrated']:.3g}, "
                f"{kl['calibrated'] / kl['tuned']:.2f} of it"
            )
        took = 0.0  # what was measured is kept


def _all_in(fitting: Fitting, form: str) -> dict[str, list[Group]]:
    """All groups that may have a format."""
    pairs = zip(fitting.model.groups, fitting.choices.forms, strict=True)
    return {form: [group for group, forms in pairs if form in forms]}


def _by_form(fitting: Fitting, numbers: Sequence[int]) -> dict[str, list[Group]]:
    found: dict[str, list[Group]] = {}
    for group, forms, number in zip(
        fitting.model.groups, fitting.choices.forms, numbers, strict=True
    ):
        found.setdefault(forms[number], []).append(group)
    return found


def _made(at: Place, steps: Sequence[Any], name: str) -> Path:
    out = at.room / name.replace(" ", "-")
    api.run(api.Recipe("fit", tuple(steps)), at.model, out, jobs=1)
    return out


def _with(at: Place, weights: Path, name: str) -> Path:
    """The model with other weights, by name."""
    out = at.room / name.replace(" ", "-")
    shutil.copytree(at.model, out)
    tensors = load_file(out / "model.safetensors")
    changed = load_file(weights)
    if not changed.keys() <= tensors.keys():
        raise ValueError(f"no such weights: {sorted(changed.keys() - tensors.keys())[:3]}")
    save_file({**tensors, **changed}, out / "model.safetensors", {"format": "pt"})
    return out


def _kl(at: Place, folders: Mapping[str, Path], held_out: int) -> dict[str, float]:
    first, *others = folders.values()
    found = api.evaluate(
        first, at.model, at.held, beside=others, samples=held_out, length=LENGTH, devices=["cpu"]
    )
    logits = [one.logits for one in (found, *found.beside)]
    return {name: one.kl for name, one in zip(folders, logits, strict=True) if one is not None}


# --- AutoScheme ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    """Bits and columns of a group of each linear, by its module; seconds of finding them; the file of
    weights that AutoRound then tunes, BF16."""

    layers: Mapping[str, tuple[int, int]]
    seconds: float
    version: str
    tuned: Path


def autoscheme(at: Place, bits: float, iterations: int) -> Chosen:
    """Choice of AutoScheme, in a process of its own. Raises RuntimeError, with what that printed
    last, where it fails."""
    result = at.room / f"autoscheme-{bits}.json"
    words = [sys.executable, __file__, at.model, at.chosen_by, bits, iterations, result]
    environment = {**os.environ, "AR_DISABLE_DATASET_SUBPROCESS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, words)), env=environment, cwd=at.room, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"AutoScheme failed:\n{done.stdout[-4000:]}")
    said = json.loads(result.read_text())
    layers = {name: (one[0], one[1]) for name, one in said["layers"].items()}
    return Chosen(layers, said["seconds"], said["version"], result.with_suffix(".safetensors"))


def _numbers(fitting: Fitting, layers: Mapping[str, tuple[int, int]]) -> list[int]:
    """The choice by the number of each group's format. Raises ValueError where a group has several."""
    names = {sizes: name for name, sizes in SHARED.items()}
    found = []
    for group, forms in zip(fitting.model.groups, fitting.choices.forms, strict=True):
        experts = f"model.layers.{group.layer}.mlp.experts."
        own = {
            sizes if sizes[0] < 16 else STAY
            for module, sizes in layers.items()
            if module in group.modules or (group.experts and module.startswith(experts))
        }
        if len(own) != 1:
            raise ValueError(f"{group.name}: expected one format, AutoScheme gives {own}")
        (one,) = own
        found.append(forms.index(one if isinstance(one, str) else names[one]))
    return found


def _child(model: Path, samples: Path, bits: float, iterations: int, result: Path) -> None:
    """Let AutoRound choose and tune, and write both."""
    peer, made = import_module("auto_round"), import_module(_AUTOSCHEME)
    schemes, data = import_module("auto_round.schemes"), import_module("auto_round.calib_dataset")
    rows = [json.loads(line)["input_ids"] for line in samples.read_text().splitlines()]

    @data.register_dataset("qconvert-samples")  # type: ignore[untyped-decorator]
    def _samples(**_: Any) -> Any:
        from_list = import_module("datasets").Dataset.from_list
        return from_list([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows])

    four, plain = (schemes.preset_name_to_scheme(name) for name in ("W4A16", "BF16"))
    options = [replace(four, bits=b, group_size=columns) for b, columns in SHARED.values()]
    asked = made.AutoScheme(
        avg_bits=bits, options=[*options, plain], shared_layers=_TOGETHER, nsamples=len(rows),
        seqlen=len(rows[0]), dataset="qconvert-samples", device_map="cpu",
    )  # fmt: skip
    seconds: list[float] = []
    find = made.GenScheme.get_layer_config

    def timed(self: Any) -> Any:
        start = time.monotonic()
        found = find(self)
        seconds.append(time.monotonic() - start)
        return found

    made.GenScheme.get_layer_config = timed
    loaded = hf.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    # Names are parts of names there: a router's is one of a gate projection's.
    left = "mlp.gate,lm_head" if hasattr(loaded.config, "num_experts") else "lm_head"
    rounder = peer.AutoRound(
        loaded, tokenizer=byte_tokenizer(), scheme=asked, iters=iterations, dataset="qconvert-samples",
        nsamples=len(rows), seqlen=len(rows[0]), ignore_layers=left, device_map="cpu",
        enable_torch_compile=False,
    )  # fmt: skip
    if iterations:
        tuned, _ = rounder.quantize()
        weights = {
            f"{name}.weight": part.weight.detach().bfloat16().contiguous()
            for name, part in tuned.named_modules()
            if isinstance(part, torch.nn.Linear) and ".layers." in name
        }
        save_file(weights, result.with_suffix(".safetensors"))
    else:
        rounder.post_init()  # chooses
    layers = {
        name: (one.get("bits", 16), one.get("group_size", 0))
        for name, one in rounder.layer_config.items()
        if ".layers." in name and not name.endswith("mlp.gate")
    }
    said = {"layers": layers, "seconds": sum(seconds), "version": peer.__version__}
    result.write_text(json.dumps(said))


def main(words: Iterable[str]) -> None:
    model, samples, bits, iterations, result = words
    _child(Path(model), Path(samples), float(bits), int(iterations), Path(result))


if __name__ == "__main__":
    main(sys.argv[1:])
