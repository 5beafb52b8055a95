"""Other projects' solvers on the model and the samples of `quality.py`, each in a process of its own.

    python benchmarks/quality_peers.py NAME MODEL SAMPLES GROUP_SIZE DEVICE RESULT

Quantizes the experts of a Qwen3-MoE, or all linear layers of a model without experts, to symmetric INT4
in groups with one of `PEERS`, with that project's own defaults, and writes what its codes mean (BF16, by
published name) and the seconds of its `quantize`.
GPTQModel 7.7 asks for a newer torch than constraints.txt has, and works with this one:

    pip install --no-deps --target DIR gptqmodel logbar tokenicer device-smi defuser pypcre threadpoolctl
    PYTHONPATH=DIR python benchmarks/quality.py --peers
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import safetensors.torch
import torch


@dataclass(frozen=True)
class Asked:
    """`samples` int64 [S, T]; `group_size` is -1 for one a row; `device` is cpu or cuda."""

    model: Path
    samples: torch.Tensor
    group_size: int
    device: str


@dataclass(frozen=True)
class Done:
    """`weights` BF16 [N, K], by published name (model.layers.L.mlp.experts.E.gate_proj.weight, ...)."""

    weights: dict[str, torch.Tensor]
    seconds: float


Peer = Callable[[Asked], Done]


def run(name: str, model: Path, samples: torch.Tensor, group_size: int, device: str) -> Done | None:
    """One of `PEERS` in a child process; None where it is not installed. Raises RuntimeError,
    with what the child printed last, where it fails."""
    if find_spec(PEERS[name][0]) is None:
        return None
    with tempfile.TemporaryDirectory(prefix="qconvert-peer-") as where:
        given, result = Path(where) / "samples.pt", Path(where) / "result.safetensors"
        torch.save(samples, given)
        words = [sys.executable, __file__, name, model, given, group_size, device, result]
        # GPTQModel starts a thread for each of 8 layers' parts otherwise, whatever cores there are.
        environment = {**os.environ, "GPTQMODEL_CPU_WORKERS": str(os.cpu_count())}
        done = subprocess.run(
            list(map(str, words)), env=environment, cwd=where, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{name} failed:\n{done.stdout[-4000:]}")
        seconds = float(json.loads(result.with_suffix(".json").read_text()))
        return Done(safetensors.torch.load_file(result), seconds)


def _autoround(iterations: int) -> Peer:
    def quantized(asked: Asked) -> Done:
        """Version 0.15: `quantize` leaves in each linear what its codes mean."""
        model = _model(asked.model)
        of_experts = any(".experts." in name for name, _ in model.named_modules())
        rounder = import_module("auto_round").AutoRound(
            model, tokenizer=byte_tokenizer(), scheme="W4A16", iters=iterations,
            dataset=[sample[None] for sample in asked.samples], nsamples=len(asked.samples),
            seqlen=asked.samples.shape[1], group_size=asked.group_size, sym=True,
            ignore_layers="self_attn,mlp.gate" if of_experts else "lm_head",
            device_map=asked.device,
        )  # fmt: skip
        start = time.monotonic()
        made, _ = rounder.quantize()
        seconds = time.monotonic() - start
        found = {
            f"{name}.weight": part.weight.detach()
            for name, part in made.named_modules()
            if isinstance(part, torch.nn.Linear)
            and (".experts." in name if of_experts else name != "lm_head")
        }
        return Done(found, seconds)

    return quantized


def _gptqmodel(asked: Asked) -> Done:
    """Version 7: packed modules, each of which dequantizes itself to [K, N]."""
    peer = import_module("gptqmodel")
    with tempfile.TemporaryDirectory() as where:
        # It takes a folder with a tokenizer alone.
        tokenizer = byte_tokenizer()
        tokenizer.save_pretrained(where)
        for file in asked.model.iterdir():
            (Path(where) / file.name).symlink_to(file)
        config = peer.QuantizeConfig(
            bits=4, group_size=asked.group_size, sym=True, dynamic={r"-:.*self_attn.*": {}},
            # Its `dequantize_weight` takes zero points as stored: the first form has them 1 too low.
            format="gptq_v2", offload_to_disk=False, device=asked.device,
        )  # fmt: skip
        model = peer.GPTQModel.load(where, config, dtype=torch.bfloat16)
        data = [{"input_ids": s, "attention_mask": torch.ones_like(s)} for s in asked.samples]
        start = time.monotonic()
        model.quantize(data, batch_size=1, tokenizer=tokenizer)
        seconds = time.monotonic() - start
        found = {
            f"{name}.weight": part.dequantize_weight().t().contiguous()
            for name, part in model.model.named_modules()
            if hasattr(part, "dequantize_weight")
        }
    return Done(found, seconds)


def _model(folder: Path) -> Any:
    import transformers

    hf: Any = transformers
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def byte_tokenizer() -> Any:
    """Of bytes: neither project works without one, and none of these samples needs one."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    hf: Any = transformers
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=alphabet[0], pad_token=alphabet[0]
    )


PEERS: dict[str, tuple[str, Peer]] = {  # the package each needs
    "AutoRound, 0 iterations": ("auto_round", _autoround(0)),
    "AutoRound, 200 (default)": ("auto_round", _autoround(200)),
    "GPTQModel": ("gptqmodel", _gptqmodel),
}


def main() -> None:
    name, model, samples, group_size, device, result = sys.argv[1:]
    asked = Asked(Path(model), torch.load(samples), int(group_size), device)
    done = PEERS[name][1](asked)
    safetensors.torch.save_file(
        {key: value.bfloat16().cpu().contiguous() for key, value in done.weights.items()}, result
    )
    Path(result).with_suffix(".json").write_text(json.dumps(done.seconds))


if __name__ == "__main__":
    main()
