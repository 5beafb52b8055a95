"""One row served, compared with its reference, and judged by fixed thresholds."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor

from served.models import VOCABULARY
from served.reference import Weights, divergence, log_probabilities, module_error
from served.rows import REAL, ROWS, Row

PROMPTS, LENGTH, NEW = 4, 48, 24
# The largest median error of a module against x @ W of its dequantized weights: rounding an output to
# bf16 alone is 0.0017. Activations are quantized in the reference as in the runtime, whose rounding
# falls otherwise in some places.
LINEAR, EXPERTS = 0.003, 0.008
LINEAR_ASYMMETRIC = 0.012
LINEAR_QUANTIZED, EXPERTS_QUANTIZED = 0.0045, 0.025
# A decoding step has four tokens, and one code of a large value that a kernel rounds to the other side
# is 0.01 of its token's output: the probable cause of 0.0103, seen with block FP8 alone, where prefill
# of 192 tokens stays at 0.0017.
# Experts in FP8 were 0.0291 on an H200, where prefill was 0.0178.
LINEAR_QUANTIZED_DECODING, EXPERTS_QUANTIZED_DECODING = 0.012, 0.04
# Of linear layers and of experts, at prefill and at decoding.
_QUANTIZED = (
    (LINEAR_QUANTIZED, EXPERTS_QUANTIZED), (LINEAR_QUANTIZED_DECODING, EXPERTS_QUANTIZED_DECODING),
)  # fmt: skip
# Next-token KL from the float32 reference, over that of transformers in bf16.
NOISE, NOISE_ASYMMETRIC = 1.5, 3.5
# The largest error of a global scale that is rounded to bf16, by which all of a matrix is off.
_BF16_SCALE = 2**-8
_TEXT = (
    "Rivers, cities and mountains have names that travellers learn before they leave home, and so a "
    "short list of facts is useful. Some of them are about countries, some about numbers, and some "
    "about what everybody sees on any morning of the year. Here is one of them, in a plain sentence."
)
_QUESTIONS = (
    "The capital of France is", "Two plus two equals", "The sun rises in the", "Ice is frozen",
)  # fmt: skip
_ANSWER = "Paris"


class Engine(Protocol):
    """A runtime in this process. `ROUNDS_GLOBAL_SCALE`: it rounds the global scales of NVFP4 to bf16."""

    ROUNDS_GLOBAL_SCALE: bool

    def serve(
        self, folder: Path, config: Mapping[str, Any], prompts: Tensor, new: int, **engine: Any
    ) -> Any: ...


def prompts(source: str, folder: Path) -> Tensor:
    """Tokens [PROMPTS, LENGTH]: random ones, the same for every tiny model; of the real one the ends of
    texts that a question follows."""
    if source != REAL:
        generator = torch.Generator().manual_seed(5)
        return torch.randint(3, VOCABULARY, (PROMPTS, LENGTH), generator=generator)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [f"{_TEXT} {question}" for question in _QUESTIONS]
    return torch.tensor([tokenizer(text)["input_ids"][-LENGTH:] for text in texts])


def root_of(row: Row) -> str:
    """The model that a row was made of."""
    while row.source != row.name:
        row = ROWS[row.source]
    return row.name


def judged(
    row: Row, folder: Path, reference: Path, source: Path | None, engine: Engine
) -> dict[str, Any]:
    """Serve `folder`; compare its modules and answers with the dequantized folder `reference`, and where
    the row says so its log-probabilities with those of the `source` served."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    model = root_of(row)
    started, given = time.time(), prompts(model, reference)
    answer = engine.serve(folder, config, given, NEW, **row.engine)
    record: dict[str, Any] = {"name": row.name, "kernels": sorted(answer.kernels)}
    found = answer.log_probabilities
    faults = []
    if bool(torch.isnan(found).any()):
        faults.append("log-probabilities are NaN")
    errors, unmatched = _module_errors(row, answer, reference, config)
    record["modules"] = {key: round(value, 5) for key, (value, _) in sorted(errors.items())}
    if unmatched:
        faults.append(f"nothing to compare {', '.join(unmatched)} with")
    rounded = engine.ROUNDS_GLOBAL_SCALE and "nvfp4" in row.command
    faults += _module_faults(row, errors, _BF16_SCALE if rounded else 0.0)
    whole = torch.cat([given, answer.tokens[:, :-1]], 1)
    last = slice(-found.shape[1], None)  # a runtime may say them of new tokens alone
    wanted = log_probabilities(reference, whole, torch.float32)[:, last]
    lost = divergence(wanted, found)
    own = divergence(wanted, log_probabilities(reference, whole, torch.bfloat16)[:, last])
    record["kl"], record["kl_bf16"] = float(lost.median()), float(own.median())
    chosen = wanted[:, -NEW:]
    picked = chosen.gather(-1, answer.tokens.to(chosen.device).unsqueeze(-1)).squeeze(-1)
    record["greedy"] = float((chosen.amax(-1) == picked).float().mean())
    if model == REAL:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(reference)
        record["answers"] = tokenizer.batch_decode(answer.tokens)
        if _ANSWER not in record["answers"][0]:
            faults.append(f"expected {_ANSWER!r} in {record['answers'][0]!r}")
    if not row.inputs:
        most = NOISE_ASYMMETRIC if row.asymmetric else NOISE
        record["noise"] = record["kl"] / max(record["kl_bf16"], 1e-12)
        if record["noise"] > most:
            faults.append(f"KL is {record['noise']:.2f} of bf16's own, at most {most} expected")
    if row.same_as_source and source is not None:
        other = engine.serve(source, config, given, NEW, **row.engine)
        if not torch.equal(found, other.log_probabilities):
            faults.append("log-probabilities differ from those of its source")
    record["seconds"] = round(time.time() - started, 1)
    record["faults"] = faults
    record["status"] = "wrong" if faults else "right"
    return record


def _module_errors(
    row: Row, answer: Any, reference: Path, config: Mapping[str, Any]
) -> tuple[dict[str, tuple[float, str]], list[str]]:
    """The largest error of each kind of module at prefill and decoding, and whose it is; modules without
    weights."""
    weights, unmatched = Weights(reference), set[str]()
    largest: dict[str, tuple[float, str]] = {}
    for seen in answer.seen:
        found = module_error(seen, weights, config, ("bf16", *row.inputs))
        if found is None:
            unmatched.add(seen.module)
            continue
        key = f"{seen.kind} {'decode' if seen.decoding else 'prefill'}"
        largest[key] = max(largest.get(key, (0.0, "")), (found, seen.module))
    return largest, sorted(unmatched)


def _module_faults(row: Row, errors: Mapping[str, tuple[float, str]], scale: float) -> list[str]:
    """Modules whose error is over the limit, which grows by that of a `scale` for each matrix."""
    faults = []
    for key, (value, module) in errors.items():
        experts = key.startswith("experts")
        if experts and row.reported:
            continue
        if row.inputs:
            most = _QUANTIZED[key.endswith("decode")][experts]
        elif experts:
            most = EXPERTS
        else:
            most = LINEAR_ASYMMETRIC if row.asymmetric else LINEAR
        most = math.hypot(most, (2 if experts else 1) * scale)
        if value > most:
            faults.append(f"{module}, {key}: error {value:.4f}, at most {most:.4f} expected")
    return faults
