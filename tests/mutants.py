"""Wrong lines: what would be published if one line of the code that makes an output were another.

A `Mutant` names a function (or a constant) and what to write in it instead. While it is applied, the
package behaves as if its source were so, in every module that has imported the function: also in
validators, if one shared the code that it judges. A `Case` is a small checkpoint, heavy-tailed, and the
command that converts it. Conversions and validation run in this process, so what is applied holds.

Mutants of compiled kernels can stand here too: `applied` takes any function of the package.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import importlib.util
import pkgutil
import sys
import textwrap
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import both_forms
import gdn_models
import numpy as np
import pytest
from adapters import lora, of_experts
from checkpoints import Model, Tensor, run_cli, tree
from encoded_models import encoded, gpt_oss, near
from encoded_models import nvfp4 as one_nvfp4
from made_once import made_once
from models import numbers_only, nvfp4_moe
from rank_files import RankFiles

import qconvert
from qconvert.validation import judgement, workers
from qconvert.validation.findings import Finding, Verdict
from qconvert.validation.runner import Request, validate_folder

# Rules that compare hashes or the receipt alone: they see that bytes changed, not that they are wrong.
_BY_HASH = {"QC020", "QC021", "QC022", "QC033"}
_NEVER_IMPORTED = ("qconvert.validators.kernels.triton.", "qconvert.contrib.", "qconvert.__main__")


# --- Mutants -------------------------------------------------------------------------------------


class Mutant(NamedTuple):
    """In `qconvert.{module}`, within the function, `Class.method` or constant `place`, `new` instead of
    `old`, which stands there once."""

    name: str
    case: str
    module: str
    place: str
    old: str
    new: str


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """The package as if its source had the mutant's line."""
    modules = _all_modules()
    module = modules[f"qconvert.{mutant.module}"]
    above, _, name = mutant.place.rpartition(".")
    owner = getattr(module, above) if above else module
    right = getattr(owner, name)
    wrong = _mutated(module, mutant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(both_forms.VARIABLE, "none")  # the two forms of an op differ now
        _forget(modules.values())
        patch.setattr(owner, name, wrong)
        if _same_frame(right, wrong):  # objects may hold the function: a Spec its `faults`
            patch.setattr(right, "__code__", wrong.__code__)
        for other in list(sys.modules.values()) if not above else ():  # those of tests, too
            if getattr(other, "__dict__", {}).get(name) is right:
                patch.setattr(other, name, wrong)
        yield
    _forget(modules.values())


def changed(mutant: Mutant) -> str:
    """The lines of its place as the mutant has them."""
    (path,) = qconvert.__path__
    return _changed(Path(path, *mutant.module.split(".")).with_suffix(".py"), mutant)


def _same_frame(right: object, wrong: object) -> bool:
    """Tell whether one function can run the lines of the other."""
    both = isinstance(right, FunctionType) and isinstance(wrong, FunctionType)
    return both and right.__code__.co_freevars == wrong.__code__.co_freevars  # type: ignore[attr-defined]


def _mutated(module: ModuleType, mutant: Mutant) -> Any:
    """The function, or the constant, that the changed lines make."""
    assert module.__file__ is not None
    code = compile(
        _changed(Path(module.__file__), mutant), f"<{mutant.name}>", "exec",
        __future__.annotations.compiler_flag, dont_inherit=True,
    )  # fmt: skip
    made: dict[str, Any] = {}
    exec(code, vars(module), made)
    return made[mutant.place.rpartition(".")[2]]


def _changed(file: Path, mutant: Mutant) -> str:
    text = file.read_text(encoding="utf-8")
    found: list[ast.AST] = [ast.parse(text)]
    for part in mutant.place.split("."):
        found = [node for tree in found for node in ast.iter_child_nodes(tree) if _is(node, part)]
    (node,) = found
    assert isinstance(node, ast.stmt)
    decorators = getattr(node, "decorator_list", [])
    first = min(one.lineno for one in (node, *decorators))
    lines = textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))
    assert lines.count(mutant.old) == 1, f"{mutant.place} has other lines now: change the mutant"
    return lines.replace(mutant.old, mutant.new)


def _is(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name == name
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


@cache
def _all_modules() -> Mapping[str, ModuleType]:
    """Every module, imported now: one that was imported later would keep a mutant for ever."""
    names = [info.name for info in pkgutil.walk_packages(qconvert.__path__, "qconvert.")]
    for name in names:
        if not name.startswith(_NEVER_IMPORTED):
            importlib.import_module(name)
    return {name: module for name, module in sys.modules.items() if name.startswith("qconvert.")}


def _forget(modules: Any) -> None:
    """What functions remember was made by other lines."""
    for module in modules:
        for value in list(vars(module).values()):
            clear = getattr(value, "cache_clear", None)
            if clear is not None and not isinstance(value, FunctionType | type):
                clear()


# --- Checkpoints ---------------------------------------------------------------------------------

Array = np.ndarray[Any, Any]
Form = Callable[[str, int, int], dict[str, Tensor]]


def plain(module: str, rows: int, columns: int) -> dict[str, Tensor]:
    return gdn_models.plain(f"{module}.weight", rows, columns)


def fp8(module: str, rows: int, columns: int) -> dict[str, Tensor]:
    """E4M3 in blocks of 48 rows and 64 columns, the last one short."""
    random = _random(module)
    codes = random.integers(0, 0x7F, (rows, columns), np.uint8)
    codes |= random.integers(0, 2, (rows, columns), np.uint8) << 7
    scales = 0.002 * np.exp(random.standard_normal((-(-rows // 48), columns // 64)))
    return {
        f"{module}.weight": Tensor("F8_E4M3", codes.shape, codes.tobytes()),
        f"{module}.weight_scale_inv": Tensor("F32", scales.shape, scales.astype("<f4").tobytes()),
    }


def fp8_rows(module: str, rows: int, columns: int) -> dict[str, Tensor]:
    """E5M2 with a scale a row."""
    random = _random(module)
    codes = random.integers(0, 0x60, (rows, columns), np.uint8)
    codes |= random.integers(0, 2, (rows, columns), np.uint8) << 7
    scales = 0.002 * np.exp(random.standard_normal((rows, 1)))
    return {
        f"{module}.weight": Tensor("F8_E5M2", codes.shape, codes.tobytes()),
        f"{module}.weight_scale": Tensor("F32", scales.shape, scales.astype("<f4").tobytes()),
    }


def half(module: str, rows: int, columns: int) -> dict[str, Tensor]:
    values = gdn_models.numbers(module, rows, columns).astype("<f2")
    return {f"{module}.weight": Tensor("F16", values.shape, values.tobytes())}


def _random(module: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(module.encode()))


def packed(bits: int, *, zeros: bool) -> Form:
    """compressed-tensors' form in groups of 32, every word another."""

    def make(module: str, rows: int, columns: int) -> dict[str, Tensor]:
        random, word = _random(module), 32 // bits
        scales = gdn_models.bf16(0.01 * np.exp(random.standard_normal((rows, columns // 32))))
        made = {"weight_packed": words(random, rows, columns // word), "weight_scale": scales}
        if zeros:
            made["weight_zero_point"] = words(random, rows // word, columns // 32)
        shape = np.array([rows, columns], "<i8")
        made["weight_shape"] = Tensor("I64", (2,), shape.tobytes())
        return {f"{module}.{part}": value for part, value in made.items()}

    return make


def words(random: np.random.Generator, rows: int, columns: int) -> Tensor:
    return Tensor("I32", (rows, columns), random.bytes(4 * rows * columns))


def gptq(module: str, rows: int, columns: int) -> dict[str, Tensor]:
    """GPTQ's first version, four bits, asymmetric, columns in an order of their own."""
    random, groups = _random(module), columns // 32
    scales = (0.01 * np.exp(random.standard_normal((groups, rows)))).astype("<f2")
    zeros = random.integers(0, 15, (groups, rows), np.uint8)  # 15 stored is no zero point
    pairs = zeros[:, ::2] | zeros[:, 1::2] << 4
    order = random.permutation(np.arange(columns) // 32).astype("<i4")
    return {
        f"{module}.qweight": words(random, columns // 8, rows),
        f"{module}.qzeros": Tensor("I32", (groups, rows // 8), pairs.tobytes()),
        f"{module}.scales": Tensor("F16", (groups, rows), scales.tobytes()),
        f"{module}.g_idx": Tensor("I32", (columns,), order.tobytes()),
    }


def _in_groups(bits: int, *, symmetric: bool) -> dict[str, Any]:
    weights = {
        "type": "int", "num_bits": bits, "strategy": "group", "symmetric": symmetric,
        "group_size": 32,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


def moe(
    form: Form = plain,
    quantization: Mapping[str, Any] | None = None,
    *,
    hidden: int = 128,
    intermediate: int = 256,
    experts: int = 2,
    drafts: int = 0,
) -> Model:
    """Experts of two layers and of draft layers, and little else."""
    tensors = gdn_models.plain("model.embed_tokens.weight", 16, hidden)
    homes = [f"model.layers.{n}" for n in range(2)] + [f"mtp.layers.{n}" for n in range(drafts)]
    for home in homes:
        for expert in range(experts):
            at = f"{home}.mlp.experts.{expert}"
            tensors |= form(f"{at}.gate_proj", intermediate, hidden)
            tensors |= form(f"{at}.up_proj", intermediate, hidden)
            tensors |= form(f"{at}.down_proj", hidden, intermediate)
    extra = {} if quantization is None else {"quantization_config": dict(quantization)}
    return Model(
        _settings("qwen3_5_moe_text", hidden, intermediate, experts, drafts) | extra, tensors
    )


def stacks(form: str = "") -> Model:
    """Experts in stacks [E, rows, columns]; `turned`: [E, columns, rows], as Qwen3-VL publishes them;
    `fp8`: in blocks of 64."""
    hidden, intermediate, experts = 128, 256, 2
    turned = form == "turned"
    base = "model.language_model" if turned else "model"
    tensors = gdn_models.plain(f"{base}.embed_tokens.weight", 16, hidden)
    for layer in range(2):
        at = f"{base}.layers.{layer}.mlp.experts"
        for name, rows, columns in (
            ("gate_up_proj", 2 * intermediate, hidden), ("down_proj", hidden, intermediate),
        ):  # fmt: skip
            if turned:
                tensors |= gdn_models.plain(f"{at}.{name}", experts, columns, rows)
            elif not form:
                tensors |= gdn_models.plain(f"{at}.{name}", experts, rows, columns)
            else:
                random, grid = _random(f"{at}.{name}"), (experts, rows // 64, columns // 64)
                codes = random.integers(0, 0x7F, (experts, rows, columns), np.uint8)
                scales = (0.002 * np.exp(random.standard_normal(grid))).astype("<f4")
                tensors[f"{at}.{name}"] = Tensor("F8_E4M3", codes.shape, codes.tobytes())
                tensors[f"{at}.{name}_scale_inv"] = Tensor("F32", grid, scales.tobytes())
    kind = "qwen3_vl_moe_text" if turned else "qwen3_5_moe_text"
    settings = _settings(kind, hidden, intermediate, experts, 0)
    if turned:
        settings = {"model_type": "qwen3_vl_moe", "text_config": settings, "vision_config": {}}
    elif form:
        settings["quantization_config"] = {**_FP8, "weight_block_size": [64, 64]}
    return Model(settings, tensors)


def listed_apart() -> Model:
    """A list of modules left out that has no fused name."""
    model = gdn_models.model(scale="F32")
    block = model.config["quantization_config"]
    names = block["modules_to_not_convert"]
    block["modules_to_not_convert"] = [name for name in names if not name.endswith("in_proj_ba")]
    return model


def corrected_routers() -> Model:
    """Routers that choose with a term for each expert, beside what they weigh with."""
    model = gdn_models.model()
    for name, value in [*model.tensors.items()]:
        if name.endswith(".mlp.gate.weight"):
            term = name.replace("gate.weight", "gate.e_score_correction_bias")
            count = value.shape[0]
            numbers = gdn_models.numbers(term, count).astype("<f4")
            model.tensors[term] = Tensor("F32", (count,), numbers.tobytes())
    return model


def _in_32(model: Model) -> Model:
    """The model with routed experts of 32 columns, in BF16."""
    model.config["text_config"]["moe_intermediate_size"] = 32
    for name in [name for name in model.tensors if ".experts." in name]:
        del model.tensors[name]
        if name.endswith(".weight"):
            model.tensors |= gdn_models.plain(name, 32, 32)
    return model


def mxfp4() -> Model:
    """A whole model with MXFP4 experts, in compressed-tensors' form."""
    model, left = gdn_models.model(), []
    model.config["text_config"]["moe_intermediate_size"] = 32
    for name, value in [*model.tensors.items()]:
        if name.endswith(".weight") and len(value.shape) == 2 and ".experts." not in name:
            left.append(name.removesuffix(".weight"))
        if ".experts." not in name:
            continue
        del model.tensors[name]
        module, random = name.removesuffix(".weight"), _random(name)
        exponents = random.integers(118, 130, (32, 1), np.uint8)
        model.tensors[f"{module}.weight_packed"] = Tensor("U8", (32, 16), random.bytes(512))
        model.tensors[f"{module}.weight_scale"] = Tensor("U8", (32, 1), exponents.tobytes())
    weights = {
        "type": "float", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True
    }  # fmt: skip
    model.config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": left,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "weights": weights, "format": "mxfp4-pack-quantized"
            }
        },
    }  # fmt: skip
    return model


def _settings(
    kind: str, hidden: int, intermediate: int, experts: int, drafts: int
) -> dict[str, Any]:
    return {
        "model_type": kind, "hidden_size": hidden, "num_hidden_layers": 2, "num_experts": experts,
        "moe_intermediate_size": intermediate, "mtp_num_hidden_layers": drafts,
    }  # fmt: skip


class Saved:
    """A model that transformers runs, whose experts have outlier channels."""

    def write(self, folder: Path) -> Path:
        from calibrate_models import qwen3_moe, saved, with_outliers

        small = {"num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 256}
        return with_outliers(saved(qwen3_moe(**small), folder))


class Tiles(NamedTuple):
    """A folder of AMX tiles, of a model of experts with so many inner columns."""

    method: str
    numa: int
    intermediate: int = 256
    experts: int = 2

    def write(self, folder: Path) -> Path:
        model = moe(intermediate=self.intermediate, experts=self.experts)
        with TemporaryDirectory() as room:
            source = model.write(Path(room) / "model")
            how = "--method", self.method, "--numa", str(self.numa)
            done = run_cli("amx", source, folder, *how, "--jobs", "1")
        assert done.code == 0, done.err
        return folder


_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 64]}
_FP8_ROWS = {"quant_method": "fp8", "fmt": "e5m2"}
_GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True,
    "checkpoint_format": "gptq",
}  # fmt: skip


def with_cache() -> Model:
    """FP8 weights, and a scale of 1 for keys and values of each layer of full attention."""
    model = gdn_models.model(scale="F32")
    one = Tensor("F32", (), np.float32(1).tobytes())
    for name in [name for name in model.tensors if name.endswith("self_attn.k_proj.weight")]:
        layer = name.removesuffix(".k_proj.weight")
        if "mtp" not in layer:
            model.tensors |= {f"{layer}.{part}_proj.{part}_scale": one for part in "kv"}
    return model


SOURCES: Mapping[str, Callable[[], Model | Saved | Tiles | RankFiles]] = {
    "experts": lambda: moe(drafts=1),
    "wide experts": lambda: moe(intermediate=3712, experts=1),
    "int4 tiles": lambda: Tiles("int4", 2),
    "int8 tiles": lambda: Tiles("int8", 2),
    "wide tiles": lambda: Tiles("int8", 1, 3712, 1),
    "fp8 experts": lambda: moe(fp8, _FP8),
    "int4 experts": lambda: moe(packed(4, zeros=False), _in_groups(4, symmetric=True)),
    "int4 experts, asymmetric": lambda: moe(
        packed(4, zeros=True), _in_groups(4, symmetric=False)
    ),
    "int8 experts": lambda: moe(packed(8, zeros=False), _in_groups(8, symmetric=True)),
    "gptq experts": lambda: moe(gptq, _GPTQ),
    "fp8 rows": lambda: moe(fp8_rows, _FP8_ROWS),
    "float16 experts": lambda: moe(half),
    "stacks": stacks,
    "turned stacks": lambda: stacks("turned"),
    "fp8 stacks": lambda: stacks("fp8"),
    "bf16": gdn_models.model,
    "bf16, corrected routers": corrected_routers,
    "bf16 stacks": lambda: gdn_models.model(stacked=True),
    "fp8": lambda: gdn_models.model(scale="F32"),
    "fp8, bf16 scales": lambda: gdn_models.model(scale="BF16"),
    "fp8, scales of a cache": with_cache,
    "fp8, listed apart": listed_apart,
    "exponents": lambda: gdn_models.model(scale="U8"),
    "mxfp4": mxfp4,
    "mxfp4 experts": lambda: encoded("qwen3_moe", "mxfp4")[0],
    "mxfp4, near": lambda: near(encoded("qwen3_moe", "mxfp4")[0]),
    "int8 bytes": lambda: encoded("qwen3_moe", "int8 asymmetric")[0],
    "awq": lambda: encoded("qwen3_moe", "awq")[0],
    "gpt-oss": lambda: gpt_oss()[0],
    "nvfp4 unsigned": lambda: one_nvfp4("modelopt"),
    "nvfp4": lambda: numbers_only(nvfp4_moe("modelopt")),
    "nvfp4 packed": lambda: numbers_only(nvfp4_moe("compressed-tensors")),
    "bf16, experts of 32 columns": lambda: _in_32(gdn_models.model()),
    "fp8, experts of 32 columns": lambda: _in_32(gdn_models.model(scale="F32")),
    "next": lambda: gdn_models.model("qwen3_next", scale="F32"),
    "rank files": RankFiles,
    "calibratable": Saved,
}  # fmt: skip


# --- Conversions ---------------------------------------------------------------------------------


class Case(NamedTuple):
    """A checkpoint of SOURCES, and a command or a recipe of one pass."""

    source: str
    command: str


_KEPT = "recipe prune: {keep: {0: [0, 2], 1: [1, 2], 2: [0, 1], 3: [0, 2], 4: [1, 2]}}"
CASES: Mapping[str, Case] = {
    "amx int4": Case("experts", "amx --method int4 --numa 2"),
    "amx int8": Case("experts", "amx --method int8 --numa 2"),
    "amx search": Case("experts", "amx --method int4 --numa 1 --rounding search"),
    "amx wide": Case("wide experts", "amx --method int4 --numa 1"),
    "recut int4 to one": Case("int4 tiles", "split --numa 1"),
    "recut int8 to one": Case("int8 tiles", "split --numa 1"),
    "recut to four": Case("int8 tiles", "split --numa 4"),
    "recut wide": Case("wide tiles", "split --numa 2"),
    "join ranks": Case("rank files", "join"),
    "amx of fp8": Case("fp8 experts", "amx --method int8 --numa 2"),
    "amx of channels": Case("fp8 rows", "amx --method int8 --numa 1"),
    "amx of float16": Case("float16 experts", "amx --method int8 --numa 1"),
    "amx of fp8 stacks": Case("fp8 stacks", "amx --method int8 --numa 1"),
    "amx of int4": Case("int4 experts", "amx --method int8 --numa 1"),
    "amx of asymmetric": Case("int4 experts, asymmetric", "amx --method int8 --numa 1"),
    "amx of int8": Case("int8 experts", "amx --method int8 --numa 1"),
    "amx of gptq": Case("gptq experts", "amx --method int8 --numa 1"),
    "amx of stacks": Case("stacks", "amx --method int8 --numa 1"),
    "amx of turned stacks": Case("turned stacks", "amx --method int8 --numa 1"),
    "dequant": Case("fp8", "dequant"),
    "dequant exponents": Case("exponents", "dequant"),
    "dequant beside a cache": Case("fp8, scales of a cache", "dequant"),
    "w4a16 beside a cache": Case("fp8, scales of a cache", "recipe w4a16: {group_size: 16}"),
    "dequant bf16 scales": Case("fp8, bf16 scales", "dequant"),
    "fuse, listed apart": Case("fp8, listed apart", "fuse --for sglang"),
    "fuse": Case("fp8", "fuse --for sglang"),
    "fuse packed": Case(
        "bf16",
        "recipe w4a16: {group_size: 16, symmetric: false, targets: [Linear]}\n"
        "- fuse: {consumer: sglang}",
    ),
    "interleave": Case("bf16", "fuse --for qwen3-next"),
    "unfuse": Case("next", "run qwen3-next-to-qwen3.5"),
    "stack": Case("bf16", "experts stack"),
    "stack fp8": Case("fp8", "experts stack"),
    "unstack": Case("bf16 stacks", "experts unstack"),
    "prune": Case("bf16, corrected routers", _KEPT),
    "prune stacks": Case("bf16 stacks", _KEPT),
    "dequant nvfp4": Case("nvfp4", "dequant"),
    "dequant nvfp4 packed": Case("nvfp4 packed", "dequant"),
    "dequant mxfp4": Case("mxfp4 experts", "dequant"),
    "dequant gpt-oss": Case("gpt-oss", "dequant"),
    "dequant int8": Case("int8 bytes", "dequant"),
    "dequant awq": Case("awq", "dequant"),
    "relabel awq": Case("awq", "relabel --to compressed-tensors"),
    "relabel awq to gptq": Case("awq", "relabel --to gptq-v2"),
    "relabel mxfp4": Case("mxfp4, near", "relabel --to fp8"),
    "relabel mxfp4 to nvfp4": Case("mxfp4", "relabel --to nvfp4 --dialect compressed-tensors"),
    "relabel nvfp4": Case("nvfp4 unsigned", "relabel --to compressed-tensors --nearest"),
    "drop": Case("bf16", "recipe drop: {what: mtp}"),
    "fp8": Case("bf16", "recipe fp8: {block: 16, exponents: true}"),
    "fp8 of fp8": Case("fp8", "recipe fp8: {block: 16, exponents: true}"),
    "fp8 rows": Case("bf16", "fp8 --channel"),
    "fp8 matrices": Case("bf16", "fp8 --tensor"),
    "fp8 matrices packed": Case("bf16", "fp8 --tensor --dialect compressed-tensors"),
    "int8": Case("bf16", "int8"),
    "cache": Case("bf16", "fp8 --channel --kv-scale 0.5"),
    "mxfp4": Case("bf16, experts of 32 columns", "mx"),
    "mxfp4 beside fp8": Case("fp8, experts of 32 columns", "mx"),
    "mxfp8": Case("bf16, experts of 32 columns", "mx --bits 8 --targets Linear"),
    "w4a16": Case("bf16", "recipe w4a16: {group_size: 16}"),
    "w4a16 of 32": Case("bf16, experts of 32 columns", "recipe w4a16: {group_size: 32}"),
    "w4a16 of fp8": Case("fp8", "recipe w4a16: {group_size: 16}"),
    "w4a16 of stacks": Case("bf16 stacks", "recipe w4a16: {group_size: 16}"),
    "w4a16 of linears": Case(
        "bf16", "recipe w4a16: {group_size: 16, targets: [Linear], ignore: ['re:.*o_proj$']}"
    ),
    "w4a16 searched": Case("bf16", "recipe w4a16: {group_size: 16, scales: search}"),
    "asymmetric searched": Case(
        "bf16", "recipe w4a16: {group_size: 16, symmetric: false, scales: search}"
    ),
    "w8a16": Case("bf16", "recipe w4a16: {group_size: null, bits: 8}"),
    "asymmetric": Case("bf16", "recipe w4a16: {group_size: 16, symmetric: false}"),
    "gptq": Case("bf16", "recipe w4a16: {group_size: 16, packing: gptq}"),
    "gptq v2": Case("bf16", "recipe w4a16: {group_size: 16, packing: gptq-v2, symmetric: false}"),
    "nvfp4": Case("bf16", "recipe nvfp4: {dialect: modelopt}"),
    "nvfp4 searched": Case("bf16", "recipe nvfp4: {dialect: modelopt, scales: search}"),
    "nvfp4 of mxfp4": Case("mxfp4", "recipe nvfp4: {dialect: compressed-tensors}"),
    "nvfp4 packed": Case("bf16", "recipe nvfp4: {dialect: compressed-tensors}"),
    "merge": Case("bf16", "merge lora --scale 0.5"),
    "merge dora": Case("bf16", "merge dora"),
    "merge experts": Case("bf16", "merge experts"),
    "merge stacks": Case("bf16 stacks", "merge experts"),
    "merge fp8": Case("fp8", "merge lora dora"),
}  # fmt: skip

_LINEARS = r".*\.(in_proj_qkv|out_proj|q_proj|gate_proj)"
ADAPTERS: Mapping[str, Callable[[Path, Path], Path]] = {
    "lora": lambda base, at: lora(base, at, _LINEARS, alpha_pattern={"out_proj": 3}),
    "dora": lambda base, at: lora(base, at, _LINEARS, use_dora=True, use_rslora=True),
    "experts": lambda base, at: of_experts(
        base, at, {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    ),
}

# Those that need transformers and llm-compressor: tests/test_mutants_calibrated.py.
_GPTQ_OPTIONS = "--gptq --synthetic --samples 24 --length 64 --device cpu"
CALIBRATED: Mapping[str, Case] = {
    "nvfp4 gptq": Case("calibratable", f"nvfp4 --dialect modelopt {_GPTQ_OPTIONS}"),
    "calibrated cache": Case(
        "calibratable",
        "fp8 --channel --kv-scale calibrated --synthetic --samples 4 --length 32 --device cpu",
    ),
    "nvfp4 gptq packed": Case(
        "calibratable", f"nvfp4 --dialect compressed-tensors {_GPTQ_OPTIONS}"
    ),
}
_EVERY = {**CASES, **CALIBRATED}


@dataclass(frozen=True)
class Bench:
    """Sources and sound outputs, made once; a folder for what conversions read beside them."""

    folder: Path

    def source(self, name: str) -> Path:
        return made_once(f"mutants/source {name}", lambda at: SOURCES[name]().write(at))

    def converted(self, case: str, out: Path) -> Path:
        source, command = _EVERY[case]
        first, _, rest = command.partition(" ")
        head, more = [first], rest.split()
        if first == "recipe":
            recipe = self.folder / f"{case}.yaml"
            recipe.write_text(f"passes:\n- {rest}\n")
            head, more = ["run", str(recipe)], []
        elif first in ("experts", "run"):
            head, more = [first, rest], []
        where: list[str | Path] = [self.source(source), *self.adapters(case)]
        more = [word for word in more if word not in ADAPTERS]
        with pytest.MonkeyPatch.context() as patch:
            # Most wrong lines are refused while planning, others before the folder is published: here
            # the finished folder is to be judged.
            patch.setattr(judgement, "judged", lambda ready, source: [Verdict()] * len(ready))
            patch.setattr(judgement, "judge_staged", lambda folders: None)
            jobs = () if "--gptq" in more else ("--jobs", "1")
            done = run_cli(*head, *where, out, *more, *jobs)
        assert done.code == 0, done.err
        return out

    def adapters(self, case: str) -> list[Path]:
        """Those that a case merges."""
        source, command = _EVERY[case]
        names = command.split()[1:] if command.startswith("merge ") else []
        base = self.source(source)
        return [
            made_once(f"mutants/adapter {source} {name}", partial(ADAPTERS[name], base))
            for name in names if name in ADAPTERS
        ]  # fmt: skip

    def sound(self, case: str) -> Path:
        return made_once(f"mutants/sound {case}", lambda out: self.converted(case, out))

    def findings(self, case: str, out: Path) -> list[Finding]:
        """What validation finds, in numpy's form and in validators' own compiled loops: the same.
        kt-kernel, where it is installed, is not asked: it takes seconds."""
        source, find = self.source(_EVERY[case].source), importlib.util.find_spec

        def found(name: str, package: str | None = None) -> Any:
            return None if name == "kt_kernel" else find(name, package)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(importlib.util, "find_spec", found)
            forms = []
            for loops in (False, True):
                patch.setattr(workers, "worth", lambda nbytes, jobs, loops=loops: loops)
                asked = Request("full", jobs=1)
                beside = [str(one) for one in self.adapters(case)]
                found_there = validate_folder(out, str(source), request=asked, adapters=beside)
                forms.append(found_there.findings)
        assert forms[0] == forms[1]
        return forms[0]


def found_wrong(findings: list[Finding]) -> list[Finding]:
    """Errors that no hash and no receipt is needed for."""
    return [f for f in findings if f.severity == "error" and f.rule not in _BY_HASH]


def differ(one: Path, other: Path) -> bool:
    """Whether two outputs hold other weights, or state something else."""
    first, second = (
        {name: data for name, data in tree(folder).items() if "receipt" not in name}
        for folder in (one, other)
    )
    return first != second
