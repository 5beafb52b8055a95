"""What `qconvert eval` must find, by transformers' own run of whole models and sums in float64: neither
layers nor logits are taken apart here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from checkpoints import read_tensors

hf: Any = transformers
Ids = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Run:
    """Of each sample: logits float64 [T, V], and hidden states after each layer [T, H]."""

    logits: list[torch.Tensor]
    hidden: list[list[torch.Tensor]]


@dataclass(frozen=True)
class Expected:
    kl: float
    kl_error: float
    source_perplexity: float
    perplexity: float
    agreement: float
    hidden: list[float]


def whole(folder: Path) -> Any:
    """The folder's class, loaded at once; no key may be missing or unexpected."""
    model, told = hf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not told["missing_keys"], sorted(told["missing_keys"])[:3]
    assert not told["unexpected_keys"], sorted(told["unexpected_keys"])[:3]
    model.config._experts_implementation = "eager"
    return model.eval()


def run(model: Any, samples: Sequence[Ids]) -> Run:
    """The class's own forward; but the head's products are summed in float64."""
    found = Run([], [])
    head = model.get_output_embeddings()
    weight = head.weight.detach().double()
    head.forward = lambda states: states.double() @ weight.T
    decoder = model.get_decoder()
    for sample in samples:
        kept: list[torch.Tensor] = []

        def keep(_module: Any, _given: Any, made: Any, kept: list[torch.Tensor] = kept) -> None:
            kept.append((made[0] if isinstance(made, tuple) else made)[0].double())

        handles = [layer.register_forward_hook(keep) for layer in decoder.layers]
        with torch.no_grad():
            ids = torch.from_numpy(sample)[None]
            logits = model(input_ids=ids, use_cache=False).logits[0]
        for handle in handles:
            handle.remove()
        assert logits.dtype == torch.float64
        found.logits.append(logits)
        found.hidden.append(kept)
    return found


def compared(source: Run, repo: Run, samples: Sequence[Ids]) -> Expected:
    kls, nlls, theirs, agree = [], [], [], []
    for a, b, sample in zip(source.logits, repo.logits, samples, strict=True):
        p, q = a[:-1].log_softmax(1), b[:-1].log_softmax(1)
        kls.append((p.exp() * (p - q)).sum(1))
        follows = torch.from_numpy(sample[1:])[:, None]
        theirs.append(-p.gather(1, follows)[:, 0])
        nlls.append(-q.gather(1, follows)[:, 0])
        agree.append((p.argmax(1) == q.argmax(1)).double())
    kl = torch.cat(kls)
    each = torch.stack([(one - kl.mean()).sum() for one in kls])
    count = len(kls)
    error = float((each.square().sum() * count / max(1, count - 1)).sqrt() / kl.numel())
    hidden = []
    for layer in range(len(source.hidden[0])):
        off = [
            (b[layer] - a[layer]).norm(dim=1) / a[layer].norm(dim=1)
            for a, b in zip(source.hidden, repo.hidden, strict=True)
        ]
        hidden.append(float(torch.cat(off).mean()))
    return Expected(
        float(kl.mean()), error, float(torch.cat(theirs).mean().exp()),
        float(torch.cat(nlls).mean().exp()), float(torch.cat(agree).mean()), hidden,
    )  # fmt: skip


def with_rounded_inputs(model: Any, rounds: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same model, whose linears but the head, routers and experts' matrices get rows that `rounds`
    made of theirs."""
    plain = torch.nn.functional.linear

    def rounded(rows: torch.Tensor, *more: Any) -> torch.Tensor:
        return plain(rounds(rows.float()).to(rows), *more)

    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last == "experts" or (isinstance(module, torch.nn.Linear) and last != "lm_head"):
            forward = module.forward

            def through(*given: Any, forward: Any = forward) -> Any:
                with mock.patch("torch.nn.functional.linear", rounded):
                    return forward(*given)

            module.forward = through
    return model


def nudged(model: Any, out: Path) -> Path:
    """The same model, each matrix 3 % off: saved by transformers as it saves any."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.mul_((1 + 0.03 * noise).to(parameter.dtype))
    model.save_pretrained(out)
    return out


def put_amx_int4(model: Any, folder: Path) -> None:
    """Put the experts of a folder for one NUMA node in the place of a model's own, by the format's
    definition: a weight is code * 16 * scale, of sizes below 3584 columns."""
    tensors = read_tensors(folder)

    def matrix(name: str, columns: int) -> torch.Tensor:
        scale = np.frombuffer(tensors[f"{name}.scale"].data, "<f4")
        packed = np.frombuffer(tensors[f"{name}.weight"].data, np.uint8)
        row, column = np.indices((scale.size, columns))
        block, within = np.divmod(row, 128)
        step, inner = np.divmod(column, 128)
        byte = inner % 64
        place = (
            ((block * 4 + within // 32) * (columns // 128) + step) * 2 + within % 32 // 16
        ) * 1024
        place += byte // 4 * 64 + within % 16 * 4 + byte % 4
        nibble = (packed[place] >> np.where(inner < 64, 0, 4)) & 15
        codes = np.where(nibble > 7, nibble.astype(np.int64) - 16, nibble)
        return torch.from_numpy((codes * (scale * np.float32(16))[:, None]).astype(np.float32))

    for number, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        for expert in range(experts.num_experts):
            hidden, middle = experts.down_proj.shape[1:]
            name = f"blk.{number}.ffn_{{}}_exps.{expert}.numa.0"
            gate, up = (matrix(name.format(kind), hidden) for kind in ("gate", "up"))
            experts.gate_up_proj.data[expert] = torch.cat([gate, up]).bfloat16()
            experts.down_proj.data[expert] = matrix(name.format("down"), middle).bfloat16()
