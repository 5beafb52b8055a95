"""Which runtimes take a folder, and how they are started on it.

Read from what the folder says of itself: the order of its projections (runtimes/consumers.py), its
quantization block, whether it is the whole model. Checked with sglang 0.5.23, vLLM 0.33 and transformers
5.17; a runtime that is not known to load every tensor is not named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qconvert.checkpoint.family import text_config
from qconvert.hub.card.facts import amx_of, consumer_of, quantization_of
from qconvert.runtimes.consumers import RUNTIMES, takers_of_gdn

TRANSFORMERS, KTRANSFORMERS = "transformers", "ktransformers"
NO_FUSION = "--disable-shared-experts-fusion"
_VARIABLE = {"sglang": "SGLANG_PP_LAYER_PARTITION", "vllm": "VLLM_PP_LAYER_PARTITION"}
# Steps that quantize routed experts and may leave shared ones as they are.
_OF_EXPERTS = ("w4a16", "nvfp4")
_SHARED = ("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size")


def takers(manifest: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[str, ...]:
    """Runtimes that load the folder as it is, the one it was made for first; none where nothing that is
    released does."""
    if amx_of(manifest) is not None:
        return (KTRANSFORMERS,)
    if manifest.get("trtllm_gen") is not None:
        return ()
    found = list(RUNTIMES)
    groups = manifest.get("gdn_groups")
    if isinstance(groups, int):
        heads = text_config(config).get("linear_num_key_heads")
        order = takers_of_gdn(str(manifest.get("family")), groups, heads or 0)
        found = [name for name in found if name in order]
    if not _transformers_reads(quantization_of(config)):
        found = [name for name in found if name != TRANSFORMERS]
    stage = manifest.get("stage")
    if stage is not None:  # transformers would make up the layers that other stages have
        found = [name for name in found if _VARIABLE.get(name) in stage.get("environment", ())]
    made_for = consumer_of(manifest)
    return tuple(sorted(found, key=lambda name: name != made_for))


def library(manifest: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """The Hub's library_name: transformers where that loads the folder, else a runtime that does."""
    found = takers(manifest, config)
    return TRANSFORMERS if TRANSFORMERS in found else next(iter(found), None)


def command(runtime: str, manifest: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """How a runtime is started on the folder REPO."""
    stages = manifest["stage"]["of"] if manifest.get("stage") is not None else 1
    if runtime == "sglang":
        words = ["python -m sglang.launch_server --model-path REPO"]
        words += [f"--pp-size {stages}"] if stages > 1 else []
        # It would make the shared expert one of the routed ones, with their scheme, and leave its
        # weights unread where they are stored in another.
        words += [NO_FUSION] if _has_two_schemes(manifest, config) else []
        return " ".join(words)
    if runtime == "vllm":
        return "vllm serve REPO" + (f" --pipeline-parallel-size {stages}" if stages > 1 else "")
    return 'AutoModelForCausalLM.from_pretrained("REPO")'


def _has_two_schemes(manifest: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    quantized = any(step["name"] in _OF_EXPERTS for step in manifest["passes"])
    return quantized and any(text_config(config).get(key) for key in _SHARED)


def _transformers_reads(block: Mapping[str, Any] | None) -> bool:
    """Whether transformers reads what quantization steps here write. It has no modelopt; GPTQ's packing
    it reads of linear layers, not of experts; of compressed-tensors its experts have no place for zero
    points, orders and global scales; sglang's linear_fp8_config it does not know."""
    if block is None:
        return True
    method = str(block.get("quant_method"))
    if method != "compressed-tensors":
        return method not in ("modelopt", "gptq")
    if "linear_fp8_config" in block:
        return False
    groups = block.get("config_groups")
    weights = [g.get("weights") for g in groups.values()] if isinstance(groups, Mapping) else []
    return all(
        isinstance(one, Mapping)
        and one.get("symmetric") is not False
        and not one.get("actorder")
        and (one.get("type"), one.get("num_bits")) != ("float", 4)
        for one in weights
    )
