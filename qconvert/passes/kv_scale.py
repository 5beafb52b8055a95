"""kv_scale: one scale for a layer's keys, and one for its values, that runtimes keep in FP8.

Names are modelopt's, `self_attn.k_proj.k_scale` and `v_proj.v_scale`, under every dialect. Loaders of
sglang and vLLM were run over the spellings there are: classes that read any read these.
`self_attn.k_scale`, llm-compressor's, is an error in sglang's Qwen3-Next, and its DeepSeek does not read
it (it puts `attn_mqa` for `k_proj`, latent attention included).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from struct import pack
from typing import Any, ClassVar, Literal

from qconvert.checkpoint.checkpoint import HF_QUANT_CONFIG
from qconvert.core.errors import PlanError
from qconvert.core.graph import apply
from qconvert.core.names import KV_SCALES, split_parameter
from qconvert.core.roles import Kind
from qconvert.core.shown import count
from qconvert.formats.fp8.kv_scales import KvScales
from qconvert.formats.nvfp4.format import hf_quant_config
from qconvert.models.calibrated import Calibrated
from qconvert.models.skip_reasons import check_runs
from qconvert.ops.constant import Constant
from qconvert.plan.pass_options import options_with
from qconvert.plan.plan import Calibrating, LogEntry, Plan
from qconvert.samples.request import FACT, Calibration, digest_of, fact

# What makes keys and values: a projection of each, of all three, or of the latent ones.
_MAKERS = (Kind.KEY, Kind.QKV, Kind.KV_UP)
_ENDS = ("k_proj.k_scale", "v_proj.v_scale")
# compressed-tensors, `QuantizationConfig.kv_cache_scheme`; modelopt writes the first, second
# and last of it in config.json (`torch/export/convert_hf_config.py`).
_SCHEME = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}
_OF_MODELOPT = ("num_bits", "type", "dynamic")


@dataclass(frozen=True, slots=True)
class KvScale:
    """Write scales of a KV cache in FP8.

    `value` is by what keys and values are divided before they are rounded to FP8 (their largest size
    / 448), or `calibrated`: what the calibration of the pass before sees in each layer as it is served,
    or, where that one is without data, `calibrate`'s in the layers as they were. After a pass that
    quantizes, whose config has a place for it; draft layers stay without.

    Raises PlanError where the config is of another quantization, where no attention layer is known,
    where scales of a KV cache are there already, for latent attention (any scale but 1), and for a
    calibration that is missing, given twice, or cannot be run.
    """

    name: ClassVar[str] = "kv_scale"

    value: float | Literal["calibrated"]
    calibrate: Calibration | None = None

    def __post_init__(self) -> None:
        if isinstance(self.value, str):
            return
        if not 0 < self.value < inf:
            raise PlanError(f"expected a scale of the KV cache above 0, found {self.value}")
        if self.calibrate is not None:
            raise PlanError(f"the scale {self.value} needs no data: leave calibrate out")

    def __call__(self, plan: Plan) -> Plan:
        block = _with_cache(plan.config.get("quantization_config") or {})
        held = [name for name in plan.tensors if name.endswith(KV_SCALES)]
        if held:
            raise PlanError(f"{held[0]!r}: scales of a KV cache are there already, and are kept")
        layers = _attention(plan)
        if not layers:
            raise PlanError("no attention layer is known whose keys and values could have a scale")
        calibrating = self._calibrating(plan)
        digest = None
        if calibrating is None:
            constant = Constant("F32", (), pack("<f", self.value).hex())
            made = {f"{layer}.{end}": apply(constant)[0] for layer in layers for end in _ENDS}
            by = f"the constant {self.value:g}, found from no data"
        else:
            digest = digest_of(calibrating.request, plan.checkpoint.root)
            made = {}
            for layer, number in layers.items():
                op = Calibrated(None, (KvScales(),), number, None, layer, digest)
                made.update(zip((f"{layer}.{end}" for end in _ENDS), apply(op), strict=True))
            by = "their largest in a calibration / 448"
        note = (
            f"keys and values of {count(len(layers), 'layer')} are divided by {by}; a server keeps them "
            "in FP8 with --kv-cache-dtype fp8_e4m3"
        )
        own = None if self.calibrate is None else digest
        entry = LogEntry(self.name, options_with(self, own), len(made), None, (note,), "scales")
        files = {}
        if HF_QUANT_CONFIG in plan.new_files:
            files[HF_QUANT_CONFIG] = hf_quant_config(block)
        return plan.logged(
            entry,
            tensors={**plan.tensors, **made},
            config={**plan.config, "quantization_config": block},
            new_files={**plan.new_files, **files},
            facts={
                **plan.facts, "kv_scale": self.value,
                **({} if own is None or self.calibrate is None else {FACT: fact(self.calibrate, own)}),
            },
            calibration=calibrating or plan.calibration,
        )  # fmt: skip

    def _calibrating(self, plan: Plan) -> Calibrating | None:
        """The calibration that finds the scales, None for a constant."""
        latent = [n for n in plan.tensors if plan.role_index.kind(n) is Kind.KV_UP]
        if latent and self.value != 1:
            raise PlanError(
                f"{latent[0]!r} is of latent attention: sglang keeps its cache undivided and multiplies "
                "by the scale all the same, and vLLM reads none; only 1 is right"
            )
        if self.value != "calibrated":
            return None
        if plan.calibration is not None and self.calibrate is not None:
            raise PlanError("weights and KV cache share one calibration: leave kv_scale's own out")
        if plan.calibration is None and self.calibrate is None:
            raise PlanError(
                "a calibrated scale of the KV cache needs data: give kv_scale calibrate"
            )
        check_runs(plan)
        found = plan.calibration
        if found is None and self.calibrate is not None:
            found = Calibrating(Plan.identity(plan.checkpoint), self.calibrate)
        return found


def _with_cache(block: Mapping[str, Any]) -> dict[str, Any]:
    """A config's block with what it says of the KV cache: nothing in quant_method fp8, whose layers of
    attention have scales in any case. Raises PlanError for a quantization without a place for it."""
    block = dict(block)
    method = block.get("quant_method")
    if method == "compressed-tensors":
        return {**block, "kv_cache_scheme": dict(_SCHEME)}
    if method == "modelopt":
        scheme = {key: _SCHEME[key] for key in _OF_MODELOPT}
        said = {"kv_cache_quant_algo": "FP8"} if "kv_cache_quant_algo" in block else {}
        return {**block, **said, "kv_cache_scheme": scheme}
    if method == "fp8":
        return block
    raise PlanError(
        f"quant_method {method!r} has no scales of a KV cache that runtimes read: choose fp8, nvfp4, "
        "int8, or compressed-tensors' W4A16"
    )


def with_source_cache(plan: Plan, block: Mapping[str, Any]) -> Mapping[str, Any]:
    """A block for the same numbers in another form, with what the source's says of the KV cache, where
    there are scales of one. Raises PlanError for a cache in another form than FP8, and for a block
    without a place for it."""
    found = False
    for config in plan.checkpoint.quantization_configs:
        scheme, algo = (config.block.get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo"))
        if algo not in (None, "FP8") or (scheme and scheme.get("num_bits") != 8):
            raise PlanError(
                f"{config.where}: a KV cache in another form than FP8 is not relabelled"
            )
        found |= bool(scheme or algo) or config.method == "fp8"
    held = any(name.endswith(KV_SCALES) for name in plan.tensors)
    return _with_cache(block) if found and held else block


def _attention(plan: Plan) -> dict[str, int]:
    """The modules of attention of the model's own layers, and their layers."""
    found: dict[str, int] = {}
    index = plan.role_index
    for name in plan.tensors:
        if index.kind(name) in _MAKERS and not plan.family.is_mtp(name, index.dims):
            layer = index.places[name].layer
            if layer is not None:
                found[split_parameter(name)[0].rpartition(".")[0]] = layer
    return found


PASSES = (KvScale,)
