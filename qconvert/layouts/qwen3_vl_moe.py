"""Qwen3-VL MoE: Qwen3-VL-30B-A3B and Qwen3-VL-235B-A22B, Instruct and Thinking.

Names: `Qwen3VLMoeForConditionalGeneration` in transformers (models/qwen3_vl_moe/). The language
model is Qwen3-MoE's, its experts stacked. Published stacks hold columns before rows; transformers
swaps the two on loading if shapes differ (conversion_mapping.py, "qwen3_vl_moe"), and saves rows
first: a saved checkpoint differs from a published one, and only shapes tell them apart. The vision
tower also feeds early layers, through further mergers (`deepstack_merger_list`), one for each of
`deepstack_visual_indexes`.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.family import Config, Dims, Family, list_of, vision_config
from qconvert.core.roles import Kind
from qconvert.layouts._blocks import outer, parts, qwen_dims, qwen_layer, qwen_vision

_MERGER = {"norm": Kind.NORM, "linear_fc1": Kind.VISION, "linear_fc2": Kind.VISION}


def dims(config: Config) -> Dims:
    """Qwen's, with the numbers of the deepstack mergers."""
    found = qwen_dims(config)
    mergers = range(len(list_of(vision_config(config), "deepstack_visual_indexes")))
    return replace(found, groups={**found.groups, "vision_deepstack": tuple(mergers)})


FAMILY = Family(
    name="qwen3_vl_moe",
    model_types=("qwen3_vl_moe",),
    dims=dims,
    roles=(
        *outer("model.language_model."),
        *qwen_layer("", "model.language_model.layers.{L}", "all", "full_attention", "dense", "moe"),
        *qwen_vision(),
        *parts(
            "vision.deepstack.",
            "model.visual.deepstack_merger_list.{L}",
            _MERGER,
            "vision_deepstack",
            optional=True,
        ),
    ),
    tied=("lm_head", "embed_tokens"),
    stacked_transposed=True,
)
