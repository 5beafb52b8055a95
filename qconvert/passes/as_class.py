"""as_class: the same weights under another model class.

Qwen3.5's text model and Qwen3-Next compute the same function (logits are bitwise equal in bf16 and
fp64, transformers), but their checkpoints differ: names (`model.language_model.` against
`model.`), the order of the linear-attention projections (`fuse` and `unfuse` convert it), and the
config. The vision tower, which Qwen3-Next does not have, is dropped by a named rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from qconvert.checkpoint.quantization_config import renamed_modules
from qconvert.core.errors import PlanError
from qconvert.core.family import is_tied
from qconvert.core.graph import Output
from qconvert.passes.fuse import FACT
from qconvert.passes.replace_weights import sources_of
from qconvert.plan.pass_options import options_of
from qconvert.plan.plan import LogEntry, Plan

_LANGUAGE, _PLAIN, _VISION = "model.language_model.", "model.", "model.visual."
VISION_RULE = "as_class: qwen3_next has no vision tower"
# Of a multi-modal rope: a text-only class uses one position for all sections.
MROPE = ("mrope_section", "mrope_interleaved")
# Only in Qwen3-Next's config; Qwen3.5 states none of them.
_NEXT_ONLY = ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
# In a multi-modal config's root, meaningless without its vision tower.
_ROOT_ONLY = (
    "text_config", "vision_config", "image_token_id", "video_token_id", "vision_start_token_id",
    "vision_end_token_id", "architectures", "model_type",
)  # fmt: skip
# Processor files describe images; a text-only folder that has them makes runtimes look for a tower.
VISION_FILES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)


@dataclass(frozen=True, slots=True)
class AsClass:
    """Rename tensors and rewrite the config for another model class.

    `to` is `qwen3_next` from Qwen3.5, or `qwen3_5_text` (dense or MoE by the config's experts) from
    Qwen3-Next.

    Raises PlanError for another source, and if the projections are not in the order the target
    class takes: `fuse` to the interleaved order, or `unfuse`, first.
    """

    name: ClassVar[str] = "as_class"

    to: Literal["qwen3_next", "qwen3_5_text"]

    def __call__(self, plan: Plan) -> Plan:
        source = {"qwen3_next": "qwen3_5", "qwen3_5_text": "qwen3_next"}[self.to]
        if plan.family.name != source:
            raise PlanError(f"{self.to} can only be made from {source}, found {plan.family.name}")
        dims = plan.role_index.dims
        if dims.gdn is None:
            raise PlanError("the config has no linear-attention layers")
        wanted = dims.gdn[0] if self.to == "qwen3_next" else 0
        if plan.facts.get(FACT) != wanted:
            first = "`fuse: {consumer: qwen3-next}`" if wanted else "`unfuse`"
            raise PlanError(f"the projections are in another order; run {first} first")
        tensors: dict[str, Output] = {}
        tower = [name for name in plan.tensors if name.startswith(_VISION)]
        dropped = {**plan.dropped, **sources_of(plan, tower, VISION_RULE)}
        for name, output in plan.tensors.items():
            if name.startswith(_VISION):
                continue
            renamed = _PLAIN + name.removeprefix(_LANGUAGE) if name.startswith(_LANGUAGE) else name
            if renamed in tensors:
                raise PlanError(f"{name!r} would become {renamed!r}, which already exists")
            tensors[renamed] = output
        config = _to_next(plan.config) if self.to == "qwen3_next" else _to_text(plan.config)
        drafts = any(plan.family.is_mtp(name, dims) for name in plan.tensors)
        if drafts and self.to == "qwen3_5_text":  # Qwen3-Next has one and does not state it
            config.setdefault("mtp_num_hidden_layers", dims.mtp_layers)
        gone = [f for f in plan.side_files if f in VISION_FILES]
        return plan.logged(
            LogEntry(self.name, options_of(self), len(tensors), None),
            tensors=tensors,
            config=config,
            needs_class=None,
            dropped=dropped,
            side_files=tuple(f for f in plan.side_files if f not in gone),
            dropped_files={**plan.dropped_files, **dict.fromkeys(gone, VISION_RULE)},
        )


def _to_next(config: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen3.5 (root or nested) to a flat Qwen3-Next config. Qwen3.5 always normalizes its top-k
    weights and has experts in every layer or in none."""
    nested = config.get("text_config")
    root = {key: value for key, value in config.items() if key not in _ROOT_ONLY}
    text = dict(nested) if isinstance(nested, Mapping) else {}
    text.pop("model_type", None)
    merged = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", **root, **text}
    dense = not merged.get("num_experts")
    layers = int(merged["num_hidden_layers"])
    merged["norm_topk_prob"] = True
    if "tie_word_embeddings" in merged:
        merged["tie_word_embeddings"] = is_tied(config)  # of two flags the root's counts
    merged["decoder_sparse_step"] = 1
    merged["mlp_only_layers"] = list(range(layers)) if dense else []
    merged["num_experts"] = 0 if dense else merged["num_experts"]
    rope = merged.get("rope_parameters")
    if isinstance(rope, Mapping):
        merged["rope_parameters"] = {k: v for k, v in rope.items() if k not in MROPE}
    return renamed_modules(merged, _LANGUAGE, _PLAIN)


def _to_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen3-Next to a flat, text-only Qwen3.5 config."""
    if not config.get("norm_topk_prob", True):
        raise PlanError("config.json has norm_topk_prob: false, but Qwen3.5 always normalizes")
    layers = int(config["num_hidden_layers"])
    dense = sorted(config.get("mlp_only_layers") or []) == list(range(layers))
    if not dense and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
        raise PlanError(
            "expected experts in all layers or in none (Qwen3.5), found some dense layers"
        )
    kept = {key: value for key, value in config.items() if key not in _NEXT_ONLY}
    kind, cls = ("qwen3_5_text", "Qwen3_5") if dense else ("qwen3_5_moe_text", "Qwen3_5Moe")
    if dense:
        kept.pop("num_experts", None)
    return {**kept, "architectures": [f"{cls}ForCausalLM"], "model_type": kind}


PASSES = (AsClass,)
