"""Rows of the table of what runtimes serve: a folder, how it is made, and what may be expected of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from served.models import MODELS

REAL = "smol"

# How a runtime quantizes the inputs of what it multiplies, of which a reference takes the nearest.
Inputs = tuple[str, ...]
Damage = Literal["permuted rows", "negated scale", "shifted blocks", "exchanged experts"]


@dataclass(frozen=True, slots=True)
class Row:
    """A folder to serve. `command`: arguments of qconvert before source and output, "" for a model
    itself. `inputs`: names of reference.quantizers, () where activations stay bf16. `same_as_source`:
    its logits are those of its source, bit for bit. `asymmetric`: its linears have zero points, for
    which kernels on Hopper lose more. `reported`: experts whose error is shown and not judged. `layout`:
    it has its source's weights under names of a runtime, so that its reference is its source. `damage`:
    what is done to the folder, so that serving must show it."""

    name: str
    source: str
    command: str = ""
    inputs: Inputs = ()
    same_as_source: bool = False
    asymmetric: bool = False
    reported: bool = False
    layout: bool = False
    damage: Damage | None = None
    again: bool = False
    gpus: int = 1
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def expects(self) -> str:
        return "wrong" if self.damage else "right"


_CALIBRATED = "--synthetic --samples 32 --length 256"
# Of qconvert's defaults for each scheme: arguments, the runtime's quantization of inputs, and marks.
_BLOCKS: Inputs = ("fp8-128", "fp8-128-times")
_TOKENS: Inputs = ("fp8-token",)
_TENSOR: Inputs = ("fp8-tensor", "fp8-token")
_POWERS: Inputs = ("fp8-128", "fp8-128-times", "fp8-128-power")
_INT8: Inputs = ("int8-token",)

_EXPERT_ROWS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "w4": ("w4a16 --rtn", {}),
    "w4-32": ("w4a16 --rtn --group-size 32", {}),
    "w4-channel": ("w4a16 --rtn --group-size channel", {}),
    "w4-search": ("w4a16 --rtn --scales search", {}),
    "w4-gptq": (f"w4a16 --gptq {_CALIBRATED}", {}),
    "w4-asymmetric": ("w4a16 --rtn --asymmetric", {}),
    "w4-linears": ("w4a16 --rtn --scales search --targets Linear", {}),
    "w8": ("w4a16 --rtn --bits 8", {}),
    "w8-channel-linears": ("w4a16 --rtn --bits 8 --group-size channel --targets Linear", {}),
    "gptq-packing": ("w4a16 --rtn --packing gptq", {}),
    "gptq-packing-linears": ("w4a16 --rtn --packing gptq --targets Linear", {}),
    "gptq-packing-w8": ("w4a16 --rtn --packing gptq --bits 8", {}),
    "fp8": ("fp8", {"inputs": _BLOCKS}),
    "fp8-ct": ("fp8 --dialect compressed-tensors", {"inputs": _BLOCKS}),
    "fp8-channel": ("fp8 --channel", {"inputs": _TOKENS}),
    "fp8-tensor": ("fp8 --tensor", {"inputs": _TENSOR, "reported": True}),
    "fp8-static": ("fp8 --tensor --input-scale 0.05", {"inputs": ("fp8-0.05",), "reported": True}),
    "fp8-powers": ("fp8 --ue8m0", {"inputs": _POWERS}),
    "fp8-experts": ("fp8 --targets experts", {"inputs": _BLOCKS}),
    "int8": ("int8", {"inputs": _INT8}),
    "mxfp4": ("mx", {}),
    "mxfp4-linears": ("mx --targets Linear", {}),
    "mxfp8": ("mx --bits 8", {}),
    "mxfp8-linears": ("mx --bits 8 --targets Linear", {}),
    "nvfp4-ct": ("nvfp4 --dialect compressed-tensors", {}),
    "nvfp4-ct-linears": ("nvfp4 --dialect compressed-tensors --targets Linear", {}),
    "nvfp4-modelopt": ("nvfp4 --dialect modelopt --weight-only", {}),
    "nvfp4-modelopt-linears": ("nvfp4 --dialect modelopt --targets Linear --weight-only", {}),
    "nvfp4-gptq": (f"nvfp4 --dialect compressed-tensors --gptq {_CALIBRATED}", {}),
}
_DENSE_ROWS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "w4": ("w4a16 --rtn --targets Linear", {}),
    "w4-32": ("w4a16 --rtn --targets Linear --group-size 32", {}),
    "w4-search": ("w4a16 --rtn --targets Linear --scales search", {}),
    "w4-gptq": (f"w4a16 --gptq --targets Linear {_CALIBRATED}", {}),
    "w4-asymmetric": ("w4a16 --rtn --targets Linear --asymmetric", {"asymmetric": True}),
    "w8-channel": ("w4a16 --rtn --targets Linear --bits 8 --group-size channel", {}),
    "gptq-packing": ("w4a16 --rtn --targets Linear --packing gptq", {}),
    "fp8": ("fp8", {"inputs": _BLOCKS}),
    "fp8-channel": ("fp8 --channel", {"inputs": _TOKENS}),
    "fp8-tensor": ("fp8 --tensor", {"inputs": _TENSOR}),
    "int8": ("int8", {"inputs": _INT8}),
    "mxfp4": ("mx --targets Linear", {}),
    "mxfp8": ("mx --bits 8 --targets Linear", {}),
    "nvfp4-ct": ("nvfp4 --dialect compressed-tensors --targets Linear", {}),
    "nvfp4-modelopt": ("nvfp4 --dialect modelopt --targets Linear --weight-only", {}),
}
# Of other models the schemes that their classes treat otherwise.
_OTHER = (
    "w4-gptq",
    "w4-linears",
    "fp8",
    "fp8-channel",
    "int8",
    "mxfp4",
    "nvfp4-ct",
    "nvfp4-modelopt",
)
_SAME: Mapping[str, Any] = {"same_as_source": True}


def _of(model: str, table: Mapping[str, tuple[str, Mapping[str, Any]]]) -> Iterable[Row]:
    for kind, (command, marks) in table.items():
        yield Row(f"{model}-{kind}", model, command, **marks)


def _relabelled() -> Iterable[Row]:
    for name, source, command in (
        ("moe-gptq-to-ct", "moe-gptq-packing", "relabel --to compressed-tensors"),
        ("moe-ct-to-gptq-v2", "moe-w4", "relabel --to gptq-v2"),
        ("moe-nvfp4-to-modelopt", "moe-nvfp4-ct", "relabel --to modelopt --nearest"),
        ("moe-mxfp4-to-nvfp4", "moe-mxfp4", "relabel --to nvfp4 --dialect compressed-tensors"),
    ):
        yield Row(name, source, command)
    yield Row("moe-mxfp4-to-fp8", "moe-mxfp4", "relabel --to fp8", _BLOCKS)
    yield Row("moe-fp8-to-ct", "moe-fp8", "relabel --to compressed-tensors", _BLOCKS)
    yield Row("moe-dequant", "moe-fp8", "dequant")
    yield Row("moe-stack", "moe", "experts stack", same_as_source=True)
    yield Row("q35-fuse", "q35", "fuse --for sglang", layout=True)
    yield Row("q35-unfuse", "q35-fuse", "unfuse --for vllm")
    yield Row("next-unfuse", "next", "unfuse --for qwen3.5")


def _fitted() -> Iterable[Row]:
    """Mixtures: of NVFP4, INT8 and W8A16, and of FP8 and W4A16."""
    mixed = ("bf16", *_INT8, *_BLOCKS, *_TOKENS)
    of_two = " ".join(f"--formats {name}" for name in ("w4a16-g32", "fp8-channel"))
    for name, model, options in (
        ("moe-fit", "moe", "--bits 7"),
        ("moe-fit-fp8", "moe", f"--bits 6 {of_two}"),
        ("dense-fit", "dense", "--bits 7"),
        ("dense-fit-fp8", "dense", f"--bits 6 {of_two}"),
        ("ds-fit", "ds", "--bits 6"),
    ):
        yield Row(name, model, f"fit --rtn --samples 4 --length 64 {options}", mixed)


def _controls() -> Iterable[Row]:
    """Folders that are wrong: a harness that calls one of them right proves nothing."""
    yield Row("control-rows", "dense-w4", damage="permuted rows")
    yield Row("control-scale", "dense-fp8", inputs=_BLOCKS, damage="negated scale")
    yield Row("control-blocks", "dense-fp8", inputs=_BLOCKS, damage="shifted blocks")
    yield Row("control-experts", "moe-w4", damage="exchanged experts")
    yield Row("control-mx", "moe-mxfp4", damage="exchanged experts")


_CACHE: Inputs = ("bf16",)  # of linear layers; KL is not judged where the cache is quantized
# Arguments of vLLM's engine. On several GPUs, and with CUDA graphs, modules are not watched.
_GRAPHS: Mapping[str, Any] = {"enforce_eager": False}
_TWO_GPUS: Mapping[str, Any] = {"tensor_parallel_size": 2}


def _again() -> Iterable[Row]:
    """Folders that are served again: with CUDA graphs, on two GPUs, and with the cache in FP8."""
    tokens = ("moe-fp8-channel", _TOKENS)
    for source, inputs in (("moe-w4", ()), ("moe-w4-32", ()), tokens, ("moe-nvfp4-ct", ())):
        yield Row(f"{source}-graphs", source, "", inputs, again=True, engine=_GRAPHS)
        yield Row(f"{source}-tp2", source, "", inputs, again=True, gpus=2, engine=_TWO_GPUS)
    # compressed-tensors' scales switch the FP8 cache on by themselves, others wait for the argument.
    yield Row("dense-kv", "dense", "w4a16 --rtn --targets Linear --kv-scale 0.02", _CACHE)
    yield Row("dense-fp8-kv", "dense", "fp8 --kv-scale 0.02", _BLOCKS)
    cache = {"kv_cache_dtype": "fp8_e4m3"}
    yield Row("dense-fp8-kv-on", "dense-fp8-kv", "", _BLOCKS, again=True, engine=cache)


def _real() -> Iterable[Row]:
    """A real model, SmolLM2-135M-Instruct: hidden size 576, so that no group of 128 fits."""
    yield Row(REAL, REAL)
    for kind, command, inputs in (
        ("w4-search", "w4a16 --rtn --scales search --targets Linear --group-size 64", ()),
        ("w8-channel", "w4a16 --rtn --targets Linear --bits 8 --group-size channel", ()),
        ("fp8-channel", "fp8 --channel", _TOKENS),
        ("int8", "int8", _INT8),
        ("mxfp8", "mx --bits 8 --targets Linear", ()),
        ("nvfp4-ct", "nvfp4 --dialect compressed-tensors --targets Linear", ()),
    ):
        yield Row(f"{REAL}-{kind}", REAL, command, inputs)


def _all() -> Iterable[Row]:
    yield from (Row(name, name) for name in MODELS)
    yield from _of("moe", _EXPERT_ROWS)
    yield from _of("dense", _DENSE_ROWS)
    yield from _of("llama", {kind: _DENSE_ROWS[kind] for kind in ("w4-gptq", "fp8", "nvfp4-ct")})
    for model in ("next", "q35", "ds", "glm"):
        yield from _of(model, {kind: _EXPERT_ROWS[kind] for kind in _OTHER})
    yield from _relabelled()
    yield from _fitted()
    yield from _controls()
    yield from _again()
    yield from _real()


ROWS: Mapping[str, Row] = {row.name: row for row in _all()}

# What sglang serves, in order of value: a run may end before the last.
_DENSE_OF_SGLANG = ("fp8-channel", "int8", "fp8-tensor")
_EXPERTS_OF_SGLANG = (
    "fp8-channel", "int8", "fp8-powers", "fp8-ct", "fp8-tensor", "fp8-experts", "fp8-static",
)  # fmt: skip
_DENSE_MARLIN = (
    "w4", "nvfp4-modelopt", "nvfp4-ct", "gptq-packing", "w8-channel", "w4-32", "mxfp8", "mxfp4",
    "w4-asymmetric",
)  # fmt: skip
_EXPERTS_MARLIN = (
    "w4", "nvfp4-modelopt", "nvfp4-ct", "gptq-packing", "w4-linears", "nvfp4-modelopt-linears", "w8",
    "mxfp4", "mxfp8", "w4-asymmetric",
)  # fmt: skip
_OTHERS = ("glm", "ds")
_HYBRIDS = ("next", "q35")
_QUANTIZED = ("fp8", "fp8-channel", "int8")
# Rows of kernels that take sglang minutes of nvcc: while these are compiled, others are served.
MARLIN: tuple[str, ...] = (
    *(f"dense-{kind}" for kind in _DENSE_MARLIN),
    *(f"moe-{kind}" for kind in _EXPERTS_MARLIN),
    *("control-rows", "control-experts"),
    # GLM's class refuses packed shared experts where they are kept apart, as they are here.
    *("ds-w4-linears", *(f"{model}-nvfp4-modelopt" for model in _OTHERS)),
    *(f"{model}-w4-linears" for model in _HYBRIDS),
    "moe-gptq-to-ct",
)
SGLANG: tuple[str, ...] = (
    "dense",
    "dense-fp8",
    "moe",
    "moe-fp8",
    *(f"dense-{kind}" for kind in _DENSE_OF_SGLANG),
    *(f"moe-{kind}" for kind in _EXPERTS_OF_SGLANG),
    *("control-scale", "control-blocks", "llama", "llama-fp8"),
    *_OTHERS,
    *(f"{model}-{kind}" for kind in _QUANTIZED for model in _OTHERS),
    *MARLIN,
    *_HYBRIDS,
    *(f"{model}-{kind}" for kind in _QUANTIZED for model in _HYBRIDS),
    *("oss", "q35-fuse", "moe-fp8-to-ct", "moe-mxfp4-to-fp8", "moe-dequant", "moe-stack"),
)
# The rows of each runtime.
ROWS_OF: Mapping[str, tuple[str, ...]] = {"vllm": tuple(ROWS), "sglang": SGLANG}
