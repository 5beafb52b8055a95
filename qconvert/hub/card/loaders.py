"""Which runtimes load a folder, and how they are started on it.

A runtime whose loader is simulated (runtimes/serving.py) is listed if it loads the folder whole at some
size, and started as it does at the smallest. Of the others the folder's metadata decides: the order of
its projections (runtimes/consumers.py), its quantization block, whether it is the whole model; checked
with sglang 0.5.23, vLLM 0.33 and transformers 5.17. One that is not known to load every tensor is
omitted. KTransformers' line: runtimes/ktransformers.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from qconvert.checkpoint.family import text_config
from qconvert.hub.card.facts import amx_of, consumer_of, quantization_of
from qconvert.runtimes.consumers import RUNTIMES, takers_of_gdn
from qconvert.runtimes.pipeline import VARIABLE
from qconvert.runtimes.serving import Loading
from qconvert.runtimes.shared_experts import NO_FUSION, loses_shared

TRANSFORMERS, KTRANSFORMERS = "transformers", "ktransformers"

Loads = Mapping[str, Loading]
NOT_ASKED: Loads = MappingProxyType({})


def takers(
    manifest: Mapping[str, Any], config: Mapping[str, Any], said: Loads = NOT_ASKED
) -> tuple[str, ...]:
    """Released runtimes that load the folder, the one that it was made for first. `said`: the answers of
    simulated ones."""
    said = _simulated(said)
    if amx_of(manifest) is not None:
        return (KTRANSFORMERS,)
    if manifest.get("trtllm_gen") is not None or manifest.get("draft") is not None:
        return ()  # no server loads either by itself
    by_rule = _takers_by_rule(manifest, config)
    found = [name for name in RUNTIMES if (said[name].sizes if name in said else name in by_rule)]
    stage = manifest.get("stage")
    if stage is not None:  # transformers would initialize the missing layers at random
        found = [name for name in found if VARIABLE.get(name) in stage.get("environment", ())]
    made_for = consumer_of(manifest)
    return tuple(sorted(found, key=lambda name: name != made_for))


def _simulated(said: Loads) -> Loads:
    """Those that say something of the folder."""
    return {name: one for name, one in said.items() if one.simulated}


def _takers_by_rule(manifest: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Those that load it by what its metadata says."""
    found = list(RUNTIMES)
    groups = manifest.get("gdn_groups")
    if isinstance(groups, int):
        heads = text_config(config).get("linear_num_key_heads")
        order = takers_of_gdn(str(manifest.get("family")), groups, heads or 0)
        found = [name for name in found if name in order]
    if _sglang_refuses(quantization_of(config), experts=bool(manifest.get("experts"))):
        found = [name for name in found if name != "sglang"]
    if _vllm_refuses(quantization_of(config)):
        found = [name for name in found if name != "vllm"]
    if not _transformers_reads(quantization_of(config)):
        found = [name for name in found if name != TRANSFORMERS]
    return found


def _sglang_refuses(block: Mapping[str, Any] | None, *, experts: bool) -> bool:
    """Forms that sglang 0.5.23 has no class for: experts with zero points, or in INT8 with activations
    (on NPUs alone); MXFP8; and MXFP4, which its classes of Kimi-K3 and DeepSeek-V4 alone read under
    compressed-tensors' names (`models/kimi_k3.py`: others leave `weight_packed` unread, silently)."""
    if any(one.get("scale_dtype") == "torch.uint8" for one, _ in _groups(block)):
        return True
    int8 = any(one.get("type") == "int" and inputs for one, inputs in _groups(block))
    return experts and (int8 or _has_zero_points(block))


def _vllm_refuses(block: Mapping[str, Any] | None) -> bool:
    """Experts beside block FP8 in forms that vLLM 0.33 has no parameters for: it does not read
    `linear_fp8_config`, and in MIXED_PRECISION it takes other names and shapes of scales."""
    if block is None:
        return False
    layers = block.get("quantized_layers")
    named = layers.values() if isinstance(layers, Mapping) else ()
    if any(isinstance(one, Mapping) and one.get("quant_algo") == "FP8_PB_WO" for one in named):
        return True
    return "linear_fp8_config" in block


def library(
    manifest: Mapping[str, Any], config: Mapping[str, Any], said: Loads = NOT_ASKED
) -> str | None:
    """The Hub's library_name: transformers if it loads the folder, else a runtime that does."""
    found = takers(manifest, config, said)
    return TRANSFORMERS if TRANSFORMERS in found else next(iter(found), None)


def command(
    runtime: str, manifest: Mapping[str, Any], config: Mapping[str, Any], said: Loads = NOT_ASKED
) -> str:
    """The command that starts a runtime on the folder REPO."""
    said = _simulated(said)
    stages = manifest["stage"]["of"] if manifest.get("stage") is not None else 1
    tp, option = said[runtime].least if runtime in said else (0, "")
    if runtime == "sglang":
        words = ["python -m sglang.launch_server --model-path REPO"]
        words += [f"--tp-size {tp}"] if tp else []
        words += [f"--pp-size {stages}"] if stages > 1 else []
        if runtime not in said and loses_shared(config, quantization_of(config)):
            # sglang would fuse the shared expert into the routed experts, with their scheme, and skip
            # its weights if they are stored in another format.
            option = NO_FUSION
        return " ".join([*words, *([option] if option else [])])
    if runtime == "vllm":
        words = ["vllm serve REPO"]
        words += [f"--tensor-parallel-size {tp}"] if tp else []
        words += [f"--pipeline-parallel-size {stages}"] if stages > 1 else []
        return " ".join([*words, *([option] if option else [])])
    return 'AutoModelForCausalLM.from_pretrained("REPO")'


def _has_zero_points(block: Mapping[str, Any] | None) -> bool:
    return any(one.get("symmetric") is False for one, _ in _groups(block))


def _groups(block: Mapping[str, Any] | None) -> list[tuple[Mapping[str, Any], bool]]:
    """What compressed-tensors' groups state about weights, and whether activations are quantized too."""
    groups = (block or {}).get("config_groups")
    found = groups.values() if isinstance(groups, Mapping) else ()
    each = [(g.get("weights"), bool(g.get("input_activations"))) for g in found]
    return [(weights, inputs) for weights, inputs in each if isinstance(weights, Mapping)]


def _transformers_reads(block: Mapping[str, Any] | None) -> bool:
    """Whether transformers loads what quantization steps write. It does not support modelopt, sglang's
    linear_fp8_config, experts in GPTQ's packing, and experts of compressed-tensors with zero points,
    group indices, global scales or exponents."""
    if block is None:
        return True
    method = str(block.get("quant_method"))
    if method != "compressed-tensors":
        return method not in ("modelopt", "gptq")
    if "linear_fp8_config" in block:
        return False
    return all(
        one.get("symmetric") is not False
        and not one.get("actorder")
        and (one.get("type"), one.get("num_bits")) != ("float", 4)
        and one.get("scale_dtype") != "torch.uint8"
        for one, _ in _groups(block)
    )
