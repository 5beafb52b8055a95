"""Tiny models of the five families for calibration tests, and token streams with structure.

Weights are heavy-tailed, router rows differ enough that experts see different tokens, and tokens come
in runs of a small vocabulary, so that what an expert sees has directions worth keeping.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from qconvert.calibrate.engine import Event, calibrate
from qconvert.calibrate.memory import Budget
from qconvert.calibrate.settings import LayerDone, LayerStats, Matrix, Settings
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.cli.demo import heavy_tailed
from qconvert.core.int_scheme import Codes, IntScheme, Scheme
from qconvert.plan.plan import Plan
from qconvert.run.work.backend import Remark

# Its config and auto classes are typed for humans, not for mypy.
hf: Any = transformers

HIDDEN, INTERMEDIATE, EXPERTS, LAYERS, VOCAB = 128, 128, 8, 4, 300

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE,
    "num_attention_heads": 4, "max_position_embeddings": 256, "num_hidden_layers": LAYERS,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def qwen3_moe(**over: Any) -> Any:
    return hf.Qwen3MoeConfig(**{
        **COMMON, "num_key_value_heads": 2, "head_dim": 32, "num_experts": EXPERTS,
        "num_experts_per_tok": 2, **over,
    })  # fmt: skip


def _linear_attention() -> dict[str, Any]:
    """Three layers of linear attention and one of full."""
    return {
        "num_key_value_heads": 2, "head_dim": 32, "num_experts": EXPERTS, "num_experts_per_tok": 2,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "shared_expert_intermediate_size": 96, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }  # fmt: skip


def qwen3_next(**over: Any) -> Any:
    return hf.Qwen3NextConfig(**{**COMMON, **_linear_attention(), **over})


def qwen3_5_moe(**over: Any) -> Any:
    return hf.Qwen3_5MoeTextConfig(**{**COMMON, **_linear_attention(), **over})


def deepseek_v3(**over: Any) -> Any:
    """A dense layer and three with experts."""
    return hf.DeepseekV3Config(**{
        **COMMON, "intermediate_size": 320, "num_key_value_heads": 4, "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 40, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
        "v_head_dim": 32, **over,
    })  # fmt: skip


def glm4_moe(**over: Any) -> Any:
    return hf.Glm4MoeConfig(**{
        **COMMON, "intermediate_size": 320, "num_key_value_heads": 2, "head_dim": 32,
        "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, **over,
    })  # fmt: skip


def llama(**over: Any) -> Any:
    """Dense, with fewer heads of keys than of queries and columns of several widths."""
    return hf.LlamaConfig(**{
        **COMMON, "intermediate_size": 320, "num_key_value_heads": 2, "head_dim": 32,
        "num_hidden_layers": 2, **over,
    })  # fmt: skip


def qwen3(**over: Any) -> Any:
    return hf.Qwen3Config(**{
        **COMMON, "intermediate_size": 320, "num_key_value_heads": 2, "head_dim": 32,
        "num_hidden_layers": 2, **over,
    })  # fmt: skip


Make = Callable[..., Any]
FAMILIES: list[Make] = [qwen3_moe, qwen3_next, qwen3_5_moe, deepseek_v3, glm4_moe]


def saved(config: Any, folder: Path) -> Path:
    """A model with heavy-tailed weights in bf16, as transformers saves it."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            made = heavy_tailed(tuple(parameter.shape), generator)
            parameter.data.copy_(made * (4 if "embed" in name else 1))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def with_outliers(folder: Path) -> Path:
    """Input channels of experts by powers of two, and what goes into them by the inverse: the same
    function. For families whose norm before the experts multiplies by its weight."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    random = np.random.default_rng(3)
    config = json.loads((folder / "config.json").read_bytes())
    for layer in range(config["num_hidden_layers"]):
        powers = np.exp2(np.round(random.normal(0, 1, config["hidden_size"])))
        powers = torch.from_numpy(powers).bfloat16()
        base = f"model.layers.{layer}"
        tensors[f"{base}.post_attention_layernorm.weight"] /= powers
        for name in tensors:
            into = "gate_proj" in name or "up_proj" in name or name.endswith("mlp.gate.weight")
            if name.startswith(f"{base}.mlp") and into:
                tensors[name] = tensors[name] * powers
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def plan_of(folder: Path) -> Plan:
    return Plan.identity(Checkpoint.open(folder))


def samples(count: int, length: int, seed: int = 0) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """Token ids that come in streaks: each sample draws from its own forty of the vocabulary."""
    generator = np.random.default_rng(seed)
    found = []
    for number in range(count):
        some = np.random.default_rng(number % 7).integers(3, VOCAB, 40)
        found.append(some[generator.integers(0, some.size, length)].astype(np.int64))
    return found


def whole(folder: Path, tokens: Sequence[Any], attention: str) -> list[torch.Tensor]:
    """Hidden states after each layer of the whole model, samples one after another."""
    model = hf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation=attention, experts_implementation="eager"
    ).eval()
    found: list[list[torch.Tensor]] = [[] for _ in model.model.layers]
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(
            lambda m, a, result, number=number: found[number].append(result[0].reshape(-1, HIDDEN))
        )
    with torch.no_grad():
        for sample in tokens:
            model.model(torch.from_numpy(sample)[None], use_cache=False)
    return [torch.cat(states) for states in found]


def meant(codes: Codes, scheme: Scheme) -> torch.Tensor:
    """Numbers that codes stand for, BF16 [N, K]."""
    steps, scale = torch.from_numpy(codes.codes), torch.from_numpy(codes.scale)
    if isinstance(scheme, IntScheme):
        return steps.bfloat16() * scale.bfloat16().repeat_interleave(32, 1)
    assert codes.global_scale is not None
    own = torch.tensor(codes.global_scale)
    factor = scale * own if scheme.dialect == "modelopt" else scale / own
    return (steps.float() / 2 * factor.repeat_interleave(16, 1)).bfloat16()


class Kept:
    """Keeps what a calibration yields."""

    def __init__(self) -> None:
        self.made: dict[tuple[int, int, str], list[Codes]] = {}
        self.linears: dict[str, list[Codes]] = {}
        self.sources: dict[tuple[int, int, str], Sequence[Mapping[str, Any]]] = {}
        self.stats: dict[int, LayerStats] = {}
        self.remarks: list[str] = []

    def put(self, matrix: Matrix) -> None:
        if matrix.expert is None:
            assert matrix.kind not in self.linears
            self.linears[matrix.kind] = list(matrix.codes)
            return
        key = matrix.layer, matrix.expert, matrix.kind
        assert key not in self.made
        self.made[key] = list(matrix.codes)
        self.sources[key] = matrix.sources

    def done(self, layer: int, stats: LayerStats) -> None:
        self.stats[layer] = stats

    def take(self, events: Generator[Event]) -> None:
        """All that a calibration yields; it is closed where this raises."""
        with closing(events):
            for event in events:
                match event:
                    case Matrix():
                        self.put(event)
                    case LayerDone():
                        if event.stats is not None:
                            self.done(event.layer, event.stats)
                    case Remark():
                        self.remarks.append(event.text)


def calibrated(
    model: Path | Plan, room: Path, tokens: Sequence[Any], schemes: Sequence[Any], settings: Settings,
    kept: Kept | None = None, **more: Any,
) -> Kept:  # fmt: skip
    """Results of a calibration."""
    plan = plan_of(model) if isinstance(model, Path) else model
    options: dict[str, Any] = {"memory": None, "key": "k", **more}
    kept = kept or Kept()
    kept.take(calibrate(plan, tokens, schemes, settings, work_dir=room, **options))
    return kept


def same(one: Codes, other: Codes) -> bool:
    codes = np.array_equal(one.codes, other.codes) and np.array_equal(one.scale, other.scale)
    return codes and one.global_scale == other.global_scale


def assert_same(one: Kept, other: Kept) -> None:
    for mine, theirs in ((one.made, other.made), (one.linears, other.linears)):
        made: Mapping[Any, list[Codes]] = mine
        assert made.keys() == theirs.keys()
        for key, codes in made.items():
            assert all(map(same, codes, theirs[key])), key


class Stopped(Exception):
    """The process is killed here."""


class Stopping(Kept):
    """Stops when one matrix is put, by its place or its module, or when a layer is done."""

    def __init__(self, at: tuple[int, int, str] | str | int) -> None:
        super().__init__()
        self.at = at

    def put(self, matrix: Matrix) -> None:
        if self.at in ((matrix.layer, matrix.expert, matrix.kind), matrix.kind):
            raise Stopped
        super().put(matrix)

    def done(self, layer: int, stats: LayerStats) -> None:
        super().done(layer, stats)
        if layer == self.at:
            raise Stopped


class Looking(Kept):
    """Looks into the work folder when a matrix is put: names of files, and the most bytes of all."""

    def __init__(self, room: Path) -> None:
        super().__init__()
        self.room, self.most, self.names = room, 0, set[str]()

    def put(self, matrix: Matrix) -> None:
        files = list(self.room.iterdir())
        self.names |= {file.name for file in files}
        self.most = max(self.most, sum(file.stat().st_size for file in files))
        super().put(matrix)


def keep_states_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where nothing of a layer fits in memory."""
    of = Budget.of
    monkeypatch.setattr(Budget, "of", lambda memory, device: replace(of(memory, device), states={}))


# --- Text and its tokenizer ------------------------------------------------------------------------

TEXT = "".join(
    f"The {word} jumps over {n} lazy dogs, and {word} sleeps.\n" + ("\n" if n % 3 == 0 else "")
    for n, word in enumerate(["fox", "cat", "Käfer", "hare", "crow", "mole"] * 20)
)


def make_tokenizer(folder: Path, *, bos: bool = False, template: bool = True) -> None:
    """A byte-level BPE of 300 entries as a model's folder holds it; with BOS it is put before texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    plain.train_from_iterator([TEXT], trainer)
    if bos:
        plain.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    kind: Any = PreTrainedTokenizerFast  # typed for humans, not for mypy
    made = kind(tokenizer_object=plain, bos_token="<s>")
    if template:
        made.chat_template = (
            "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
            "{% endfor %}"
        )
    made.save_pretrained(folder)
