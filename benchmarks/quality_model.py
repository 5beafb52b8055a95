"""A small Qwen3-MoE trained on the spot, for `quality.py`: corpus, training, and forms of it that
compute the same function with outlier channels.

A model with random weights says little about codes: what its inputs have in common, and which experts
matter, comes from training.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

hf: Any = transformers
VOCAB = 256  # bytes
_LARGEST = 200_000  # bytes of a file that enters the corpus
_HELD_OUT = 20  # every so many files
_OUTLIERS = {
    "as trained": 0.0,
    "mid": 0.6,
    "heavy": 1.0,
}  # standard deviation of the exponents of two


@dataclass(frozen=True)
class Size:
    """Of a model and its training; `batch` samples of `length` bytes a step. Without experts it is a
    dense Qwen3."""

    hidden: int
    middle: int
    layers: int
    experts: int
    top_k: int
    heads: int
    length: int
    batch: int
    corpus: int


SMALL = Size(256, 128, 2, 8, 2, 4, 128, 8, 12_000_000)
LARGE = Size(512, 256, 4, 16, 4, 8, 512, 64, 80_000_000)
# Of four layers, for mixtures of formats: every matrix in whole blocks of 128.
MOE = Size(256, 256, 4, 8, 2, 4, 128, 8, 12_000_000)
DENSE = Size(256, 512, 4, 0, 0, 4, 128, 8, 12_000_000)


def corpus(limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Python and Debian text found on the machine, uint8: to train on, and held out, by file."""
    roots = [sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], "/usr/share/doc"]
    files = sorted({file for root in roots for file in _texts(Path(root))}, key=_shuffled)
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total, seen = 0, set[bytes]()
    for number, file in enumerate(files):
        content = file.read_bytes()
        head = content[:400]
        if head in seen or total >= limit:  # copies of one licence would be learnt by heart
            continue
        seen.add(head)
        parts[number % _HELD_OUT == 0].append(content + b"\0")
        total += len(content)
    train, held = (torch.frombuffer(bytearray(b"".join(p)), dtype=torch.uint8) for p in parts)
    return train, held


def _texts(root: Path) -> Iterator[Path]:
    for file in root.rglob("*"):
        known = file.suffix in (".py", ".txt", ".rst", ".md") or file.name == "copyright"
        if known and file.is_file() and 1500 <= file.stat().st_size <= _LARGEST:
            yield file


def _shuffled(file: Path) -> str:
    return hashlib.sha256(str(file).encode()).hexdigest()


def samples_of(text: torch.Tensor, count: int, length: int, seed: int) -> torch.Tensor:
    """int64 [count, length], drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, text.numel() - length, (count,), generator=generator)
    return text[starts[:, None] + torch.arange(length)].long()


def trained(size: Size, seconds: float, device: str, folder: Path) -> tuple[int, float]:
    """Train for some seconds and save as BF16. Returns steps, and held-out cross entropy in nats."""
    torch.manual_seed(0)
    train, held = corpus(size.corpus)
    config = _config(size)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0, betas=(0.9, 0.95), weight_decay=0.1)
    start, step = time.monotonic(), 0
    while (part := (time.monotonic() - start) / seconds) < 1:
        rate = 1.5e-3 if size is LARGE else 3e-3
        rate *= min(1, (step + 1) / 50) * (0.05 + 0.475 * (1 + math.cos(math.pi * part)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        tokens = samples_of(train, size.batch, size.length, 1000 + step).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 50 == 0:
            print(
                f"  step {step}, {time.monotonic() - start:.0f} s: {float(loss.detach()):.3f}",
                flush=True,
            )
    if size.experts:
        model.config.output_router_logits = False
    model = model.eval().to("cpu", torch.bfloat16)
    model.save_pretrained(folder)
    with torch.no_grad():
        test = samples_of(held, 32, size.length, 2)
        return step, float(model.float()(test, labels=test).loss)


def _config(size: Size) -> Any:
    given = {
        "vocab_size": VOCAB, "hidden_size": size.hidden, "intermediate_size": size.middle,
        "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads // 2, "head_dim": 64, "tie_word_embeddings": True,
        "max_position_embeddings": size.length, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    if not size.experts:
        return hf.Qwen3Config(**given)
    return hf.Qwen3MoeConfig(
        **given, moe_intermediate_size=size.middle, num_experts=size.experts,
        num_experts_per_tok=size.top_k, norm_topk_prob=True, output_router_logits=True,
        router_aux_loss_coef=0.01,
    )  # fmt: skip


def variant(model: Any, kind: str) -> float:
    """Scale input channels of experts by powers of two, and what goes into them by the inverse: the
    same function with outlier channels. Returns the kurtosis of a gate_up matrix."""
    spread = _OUTLIERS[kind]
    generator = torch.Generator().manual_seed(11)

    def factors(*shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator) * spread
        return torch.exp2(drawn.round().clamp(-3, 3))

    with torch.no_grad():
        for layer in model.model.layers:
            gate_up, down = layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj
            into = factors(gate_up.shape[2])
            layer.post_attention_layernorm.weight /= into
            layer.mlp.gate.weight *= into
            gate_up *= into
            middle = factors(down.shape[0], down.shape[2])
            gate_up[:, down.shape[2] :] /= middle[:, :, None]
            down *= middle[:, None]
        weight = model.model.layers[-1].mlp.experts.gate_up_proj[0].float()
    centred = weight - weight.mean()
    return float(centred.pow(4).mean() / centred.square().mean().square())


VARIANTS = tuple(_OUTLIERS)
