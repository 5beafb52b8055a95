"""config.json: types of every key that qconvert reads, quantization blocks, forms of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hostile.breaking.texts import (
    DIGITS,
    LONG,
    NOT_A_SIZE,
    STEERING,
    SURROGATE,
    Raw,
    deep,
    dumped,
    nested,
)
from hostile.case import Break, Ground, Mutation, Verdict

GROUP = "config"
_SIZES = (
    "num_hidden_layers", "num_experts", "hidden_size", "moe_intermediate_size",
    "decoder_sparse_step", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "mtp_num_hidden_layers", "n_routed_experts", "first_k_dense_replace",
    "num_nextn_predict_layers",
    "vocab_size", "num_attention_heads", "head_dim",
)  # fmt: skip
# Of drafts that stand alone, and of their layers or blocks.
_OF_DRAFTS = (
    "transformer_layer_config", "speculators_config", "speculators_model_type", "eagle_config",
    "dflash_config", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "block_size",
    "aux_hidden_state_layer_ids", "norm_before_residual", "fc_norm", "target_hidden_size",
    "num_aux_hidden_states", "mask_token_id", "layer_types", "hidden_size", "architectures",
)  # fmt: skip
_OF_LAYERS = (
    "num_hidden_layers", "hidden_size", "vocab_size", "model_type", "layer_types", "mask_token_id",
    "target_layer_ids", "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states",
)  # fmt: skip
_ANY: dict[str, Any] = {
    "null": None, "list": [1], "object": {"a": 1}, "number": 7, "text": "x", "true": True,
    "5000 digits": Raw(DIGITS), "NaN": Raw("NaN"), "deep": nested(3000), "deep object": deep(3000),
    "long": LONG, "surrogate": SURROGATE,
}  # fmt: skip
# Blocks of every method, with what is broken in each.
_BLOCKS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "compressed": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
            "group_size": 32}}},
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
                 "ignore": ["lm_head"]},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
}  # fmt: skip


def config_of(ground: Ground) -> Path:
    return ground.at / "config.json"


def _edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Ground], None]:
    def make(ground: Ground) -> None:
        value = json.loads(config_of(ground).read_bytes())
        change(value)
        config_of(ground).write_bytes(dumped(value))

    return make


def _set(key: str, value: Any) -> Callable[[Ground], None]:
    """In the text config where there is one."""

    def change(config: dict[str, Any]) -> None:
        inner = config.get("text_config")
        (inner if isinstance(inner, dict) else config)[key] = value

    return _edit(change)


def _set_root(key: str, value: Any) -> Callable[[Ground], None]:
    return _edit(lambda config: config.update({key: value}))


def _set_layers(key: str, value: Any) -> Callable[[Ground], None]:
    """In the config of a draft's layers, or the block that a draft has instead."""

    def change(config: dict[str, Any]) -> None:
        for inner in ("transformer_layer_config", "dflash_config", "eagle_config"):
            config.setdefault(inner, {})[key] = value

    return _edit(change)


def _bytes(data: bytes) -> Break:
    return lambda ground: config_of(ground).write_bytes(data)


def _encoded(codec: str) -> Break:
    return lambda ground: config_of(ground).write_bytes(config_of(ground).read_text().encode(codec))


def _paths(block: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    if isinstance(block, dict):
        for key, value in block.items():
            yield from _paths(value, (*at, key))
    elif isinstance(block, list):
        for number, value in enumerate(block):
            yield from _paths(value, (*at, number))


def _put(block: Any, path: tuple[Any, ...], value: Any) -> Any:
    found = json.loads(json.dumps(block))
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return found


def _mutations() -> Iterator[Mutation]:
    def one(name: str, make: Break, **more: Any) -> Mutation:
        more.setdefault("culprit", ("config",))
        return Mutation(name, GROUP, make, **more)

    forms = {
        "empty": b"", "spaces": b"   ", "null": b"null", "list": b"[]", "text": b'"x"',
        "number": b"1", "no JSON": b"{", "cut off": b'{"model_type": "qwen3_moe", "num_h',
        "invalid UTF-8": b'{"model_type": "\xff\xfe"}', "nul bytes": bytes(4096),
        "nested lists": b"[" * 100_000 + b"]" * 100_000,
        "nested objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        "nested lists in it": b'{"model_type": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        "two values": b"{} {}", "a pickle": b"\x80\x04K\x01.", "YAML": b"model_type: qwen3_moe\n",
        "HTML": b"<!DOCTYPE html><html></html>",
    }  # fmt: skip
    for name, data in forms.items():
        yield one(f"form {name}", _bytes(data))
    yield one("form empty object", _bytes(b"{}"), verdict=Verdict.EITHER, culprit=())
    for name, codec in {"BOM": "utf-8-sig", "UTF-16": "utf-16", "UTF-32": "utf-32"}.items():
        yield one(f"form {name}", _encoded(codec), verdict=Verdict.EITHER)  # fmt: skip
    yield one("form doubled keys", _bytes(b'{"model_type": "qwen3_moe", "model_type": "llama"}'),
              verdict=Verdict.EITHER, culprit=())  # fmt: skip
    yield one("form 20 MB", _edit(lambda c: c.update(x="y" * 20_000_000)))
    yield one("form 200,000 keys", _edit(lambda c: c.update({f"k{n}": n for n in range(200_000)})),
              verdict=Verdict.EITHER, culprit=())  # fmt: skip

    # What a family reads of these differs, so each command may or may not mind.
    for key in _SIZES:
        for name, value in NOT_A_SIZE.items():
            yield one(f"{key} {name}", _set(key, value), verdict=Verdict.EITHER, culprit=(), most=2)
    for key in ("model_type", "architectures", "torch_dtype", "tie_word_embeddings", "layer_types",
                "mlp_only_layers", "hidden_act", "transformers_version", "auto_map"):  # fmt: skip
        for name, value in _ANY.items():
            yield one(
                f"{key} {name}", _set_root(key, value), verdict=Verdict.EITHER, culprit=(), most=2
            )
    for key in ("text_config", "vision_config", "quantization_config", "compression_config"):
        for name, value in _ANY.items():
            yield one(
                f"{key} {name}", _set_root(key, value), verdict=Verdict.EITHER, culprit=(), most=2
            )
    for key in ("model_type", "architectures", "torch_dtype", "quantization_config"):
        for name, text in STEERING.items():
            told: Any = text
            if key == "architectures":
                told = [text]
            if key == "quantization_config":
                told = {"quant_method": text}
            yield one(
                f"{key} {name}", _set_root(key, told), verdict=Verdict.EITHER, culprit=(), most=4
            )
    yield one("a key that steers", _edit(lambda c: c.update({STEERING["newline command"]: 1})),
              verdict=Verdict.EITHER, culprit=())  # fmt: skip
    for key in _OF_DRAFTS:
        for name, value in _ANY.items():
            yield one(f"draft {key} {name}", _set_root(key, value), verdict=Verdict.EITHER,
                      culprit=(), needs=frozenset({"draft"}))  # fmt: skip
    for key in _OF_LAYERS:
        for name, value in _ANY.items():
            yield one(f"draft layers {key} {name}", _set_layers(key, value), culprit=(),
                      verdict=Verdict.EITHER, needs=frozenset({"draft"}), most=2)  # fmt: skip
    for method, block in _BLOCKS.items():
        yield one(f"block {method}", _set_root("quantization_config", block),
                  verdict=Verdict.EITHER, culprit=(), most=4)  # fmt: skip
        for path in _paths(block):
            label = ".".join(map(str, path))
            for name, value in (("null", None), ("list", [[]]), ("object", {"a": {}}),
                                ("negative", -1), ("5000 digits", Raw(DIGITS)),
                                ("steers", STEERING["newline command"])):  # fmt: skip
                yield one(f"block {method} {label} {name}",
                          _set_root("quantization_config", _put(block, path, value)),
                          verdict=Verdict.EITHER, culprit=(), most=1)  # fmt: skip
    yield one("block in a block in a block",
        _set_root("a_config", {"b_config": {"quantization_config": {
        "quant_method": "fp8", "weight_block_size": [0, 0]}}}), verdict=Verdict.EITHER,
        culprit=())  # fmt: skip
    yield one("1,000 nested configs", _edit(lambda c: c.update(_chain(900))),
              verdict=Verdict.EITHER, culprit=())  # fmt: skip
    for name, pattern in (("catastrophic", "re:(a+)+$"), ("no expression", "re:((("),
                          ("steers", STEERING["escape"])):  # fmt: skip
        yield one(f"ignore {name}", _set_root("quantization_config", {
            **_BLOCKS["compressed"], "ignore": [pattern, "a" * 40 + "!"]}),
            verdict=Verdict.EITHER, culprit=())  # fmt: skip

    yield Mutation("hf_quant_config list", GROUP, _beside("hf_quant_config.json", b"[]"),
                   ("hf_quant_config.json",), Verdict.EITHER)  # fmt: skip
    for name, data in {
        "no JSON": b"{", "quantization list": b'{"quantization": []}',
        "quantization null": b'{"quantization": null}',
        "nested": b'{"quantization": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        "algo list": b'{"quantization": {"quant_algo": ["NVFP4"], "group_size": {}}}',
        "algo steers": json.dumps({"quantization": {"quant_algo": STEERING["escape"]}}).encode(),
        "5,000 digits": b'{"quantization": {"group_size": ' + DIGITS.encode() + b"}}",
    }.items():  # fmt: skip
        yield Mutation(f"hf_quant_config {name}", GROUP, _beside("hf_quant_config.json", data),
                       (), Verdict.EITHER)  # fmt: skip
    for name, data in {
        "no JSON": b"{", "list": b"[]", "nested": b"[" * 100_000, "5,000 digits":
        b'{"eos_token_id": ' + DIGITS.encode() + b"}",
    }.items():  # fmt: skip
        yield Mutation(f"generation_config {name}", GROUP, _beside("generation_config.json", data),
                       (), Verdict.EITHER)  # fmt: skip


def _beside(name: str, data: bytes) -> Break:
    return lambda ground: (ground.at / name).write_bytes(data)


def _chain(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"quantization_config": {"quant_method": "fp8"}}
    for _ in range(depth):
        found = {"x_config": found}
    return found


MUTATIONS = tuple(_mutations())
