"""DeepSeek-V4 (Flash and Pro): compressed attention with an indexer, hyper-connections, experts in FP4.

Names: as vLLM (models/deepseek_v4/nvidia/model.py) and sglang (models/deepseek_v4.py, and
deepseek_v4_nextn.py of the draft layers, `mtp.0.`) read them. Which layers have what: `compress_ratios`
(a compressor where it is above 0, an indexer where it is 4) and `num_hash_layers`, whose router looks
experts up by token (`tid2eid`) and has no bias. transformers saves `kv_norm` as `norm`, behind
`model.`.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.family import Config, Dims, Family, Role, first_int, list_of
from qconvert.core.roles import Kind
from qconvert.layouts._blocks import deepseek_dims, parts

_NORMS = {"attn_norm": Kind.NORM, "ffn_norm": Kind.NORM}
_ATTENTION = {
    "wq_a": Kind.QUERY_DOWN, "wq_b": Kind.QUERY_UP, "wkv": Kind.KV_DOWN, "wo_a": Kind.OUTPUT_DOWN,
    "wo_b": Kind.OUTPUT, "kv_norm": Kind.NORM, "attn_sink": Kind.BUFFER,
}  # fmt: skip
# sglang builds compressors in BF16, whatever the quantization config says (models/deepseek_v4.py), as it
# does the weights of an indexer.
_COMPRESSOR = {
    "compressor.wgate": Kind.INDEXER_WEIGHTS, "compressor.wkv": Kind.INDEXER_WEIGHTS,
    "compressor.norm": Kind.NORM, "compressor.ape": Kind.POSITION,
}  # fmt: skip
_INDEXER = {
    "wq_b": Kind.INDEXER_QUERY, "weights_proj": Kind.INDEXER_WEIGHTS, **_COMPRESSOR,
}  # fmt: skip
_SHARED = {"w1": Kind.SHARED_GATE, "w3": Kind.SHARED_UP, "w2": Kind.SHARED_DOWN}
_EXPERTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_KINDS = {"w1": Kind.EXPERT_GATE, "w3": Kind.EXPERT_UP, "w2": Kind.EXPERT_DOWN}
_HYPER = ("attn", "ffn")
_JOINS = {
    "e_proj": Kind.DRAFT_JOIN, "h_proj": Kind.DRAFT_JOIN, "enorm": Kind.NORM, "hnorm": Kind.NORM,
    "norm": Kind.NORM,
}  # fmt: skip


def dims(config: Config) -> Dims:
    """DeepSeek's, with the layers of each kind of attention and of router."""
    found = deepseek_dims(config)
    ratios, hashed = list_of(config, "compress_ratios"), first_int(config, "num_hash_layers")
    layers, mtp = range(found.num_layers), tuple(range(found.mtp_layers))
    at = dict(zip(layers, ratios, strict=False))
    groups = {
        "all": tuple(layers), "moe": tuple(layers), "mtp": mtp, "mtp_moe": mtp,
        "compressed": tuple(n for n in layers if at.get(n)),
        "indexed": tuple(n for n in layers if at.get(n) == 4),
        "hashed": tuple(layers[:hashed]), "scored": tuple(layers[hashed:]),
    }  # fmt: skip
    return replace(found, groups=groups)


def _buffers(prefix: str, at: str, blocks: tuple[str, ...], layers: str) -> tuple[Role, ...]:
    kinds = {
        f"hc_{block}_{name}": Kind.BUFFER for block in blocks for name in ("base", "fn", "scale")
    }
    return parts(prefix, at, kinds, layers, optional=layers == "mtp")


def _layer(prefix: str, at: str, every: str, moe: str) -> tuple[Role, ...]:
    draft = bool(prefix)
    return (
        *parts(prefix, at, _NORMS, every, optional=draft),
        *parts(f"{prefix}attn.", f"{at}.attn", _ATTENTION, every, optional=draft),
        # Of the low rank, not of a head: no q_norm as other families have.
        Role(f"{prefix}attn.q_a_norm", f"{at}.attn.q_norm", Kind.NORM, every, draft),
        *_buffers(prefix, at, _HYPER, every),
        *parts(
            f"{prefix}shared_experts.", f"{at}.ffn.shared_experts", _SHARED, every, optional=draft
        ),
        *(
            Role(
                f"{prefix}experts.{role}",
                f"{at}.ffn.experts.{{E}}.{name}",
                _KINDS[name],
                moe,
                draft,
            )
            for name, role in _EXPERTS.items()
        ),
    )


_AT, _GATE = "@layers.{L}", "@layers.{L}.ffn.gate"
_MTP = "mtp.{L}"
FAMILY = Family(
    name="deepseek_v4",
    model_types=("deepseek_v4",),
    dims=dims,
    prefixes=("", "model."),
    roles=(
        Role("embed_tokens", "embed", Kind.EMBEDDING),
        Role("norm", "@norm", Kind.NORM),
        Role("lm_head", "head", Kind.HEAD),
        *(Role(f"hc_head_{x}", f"hc_head_{x}", Kind.BUFFER) for x in ("base", "fn", "scale")),
        *_layer("", _AT, "all", "moe"),
        *parts("attn.", f"{_AT}.attn", _COMPRESSOR, "compressed"),
        *parts("attn.indexer.", f"{_AT}.attn.indexer", _INDEXER, "indexed"),
        Role("router.hashed", _GATE, Kind.ROUTER, "hashed"),
        Role("router.hashed.tid2eid", f"{_GATE}.tid2eid", Kind.BUFFER, "hashed"),
        Role("router", _GATE, Kind.ROUTER, "scored"),
        *_layer("mtp.", _MTP, "mtp", "mtp_moe"),
        Role("mtp.router", f"{_MTP}.ffn.gate", Kind.ROUTER, "mtp_moe", optional=True),
        *parts("mtp.", _MTP, _JOINS, "mtp", optional=True),
        *_buffers("mtp.", _MTP, ("head",), "mtp"),
    ),
    tied=("lm_head", "embed_tokens"),
    mtp=("mtp.",),
    not_on_cpus="its experts clamp values (swiglu_limit)",
)
