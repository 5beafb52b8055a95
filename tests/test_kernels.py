"""Triton kernels in the interpreter: they give what their references give on random weights, wrong
inputs show, they compile for GPUs, and `--kernels` says of a folder what they found.

Each runs in a process of its own: Triton decides when it is imported whether it interprets, and in a
test process others may have imported it. On a GPU: `python tests/kernel_matrix.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import amx_rows
import numpy as np
import pytest
import short_kernels
from checkpoints import Model, Tensor, convert, copied, fp8_moe, read_shard, run_cli, tensor

Q = "model.layers.0.self_attn.q_proj.weight"
STACK = "model.layers.0.mlp.experts.gate_up_proj"
TILES = "blk.1.ffn_down_exps.1.numa.1"
PACKED = "model.layers.1.mlp.experts.1.up_proj.weight_packed"
OURS = ("fp8_dequant", "amx_tiles", "w4a16")
KERNELS = ("fp8", "amx", "w4a16")


def child(*words: str | Path, interpret: bool = False) -> str:
    """What a script prints that sees no GPU and has not been told to interpret, unless it is to be."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def ours(task: str, *words: str) -> Any:
    """The result of a function of this file, called in another process."""
    return json.loads(child(__file__, task, *words).splitlines()[-1])


# --- random weights ------------------------------------------------------------------------------


@pytest.mark.big
@pytest.mark.parametrize(("kernel", "cases"), [("fp8", 30), ("amx", 30), ("w4a16", 90)])
def test_kernel_and_reference_agree(kernel: str, cases: int) -> None:
    matrix = Path(__file__).with_name("kernel_matrix.py")
    lines = child(matrix, kernel, interpret=True).splitlines()
    assert lines[0].startswith("# Triton's interpreter, triton ")
    assert lines[-1] == "# all fit"
    assert len([line for line in lines if line.startswith(f"{kernel}\tfits\t")]) >= cases


def wrong_inputs() -> tuple[dict[str, tuple[float, float, bool]], dict[str, str]]:
    """Kernels on inputs that are not the references', and what they say of those of wrong shapes."""
    from qconvert.validators.kernels.device import Case, bitwise, device

    where = device()
    import torch

    from qconvert.validators.kernels.triton import amx, fp8, w4a16

    random = torch.Generator().manual_seed(1)
    found: list[Case] = []
    codes, scales = fp8.drawn((256, 256), (128, 128), "F32", "student", random)
    right = fp8.reference(codes, scales, (128, 128))
    made = fp8.dequant(codes, scales, (128, 128))
    found.append(bitwise("fp8 as it is", made, right))
    for name, others in {
        "fp8 scales of the next block": scales.roll(1, 1),
        "fp8 scales of the block below": scales.roll(1, 0),
        "fp8 scales inverted": 1 / scales,
    }.items():
        found.append(bitwise(name, fp8.dequant(codes, others, (128, 128)), right))
    one = codes.clone()
    one[255, 255] ^= 1
    found.append(bitwise("fp8 one code", fp8.dequant(one, scales, (128, 128)), right))
    found.append(bitwise("fp8 another shape", made[:128], right))

    for method in ("int4", "int8"):
        packed, steps = amx.drawn(method, 128, 3840, "student", random)
        right = amx.reference(method, packed, steps, 3840)
        halves = (packed >> 4) | (packed << 4)
        for name, data, scale in (
            ("as it is", packed, steps),
            ("nibbles turned", halves, steps),
            ("scales of the next row", packed, steps.roll(1)),
            ("scales not moved by 16", packed, steps / 16),
            ("tiles moved by one", packed.roll(2048), steps),
            ("words moved by one", packed.roll(4), steps),
        ):
            made = amx.unpacked(method, data, scale, 3840)
            found.append(bitwise(f"{method} {name}", made, right))

    packed, scales = w4a16.drawn(64, 2048, 32, "student", random)
    tokens = w4a16.tokens(7, 2048, random)
    right, size = w4a16.reference(tokens, packed, scales, 32)
    nibbles = [(packed >> 4 * i) & 15 for i in range(8)]
    turned = sum(nibble << (28 - 4 * i) for i, nibble in enumerate(nibbles))
    assert isinstance(turned, torch.Tensor)
    one = packed.clone()
    one[63, 100] ^= 1 << 12
    tf32 = (tokens.view(torch.int32) & ~0x1FFF).view(torch.float32)
    for name, x, words, factors in (
        ("as it is", tokens, packed, scales),
        ("nibbles turned", tokens, turned.to(torch.int32), scales),
        ("one code off by one", tokens, one, scales),
        ("scales of the next group", tokens, packed, scales.roll(1, 1)),
        ("scales of the next row", tokens, packed, scales.roll(1, 0)),
        ("tokens in TF32", tf32, packed, scales),
        ("tokens in bf16", tokens.bfloat16(), packed, scales),
    ):
        made = w4a16.product(x, words, factors, 32)
        found.append(w4a16.judged(f"w4a16 {name}", made, right, size, 2048))
    scales[0, 0] = float("nan")
    found.append(w4a16.compared("w4a16 a scale that is NaN", tokens, packed, scales, 32))
    assert where == "cpu"
    return {case.name: (case.difference, case.bound, case.fits) for case in found}, refusals()


@pytest.mark.big
def test_wrong_inputs_show() -> None:
    found, refused = ours("wrong_inputs")
    fitting = {name for name, (_, _, fits) in found.items() if fits}
    assert fitting == {f"{name} as it is" for name in ("fp8", "int4", "int8", "w4a16")}
    assert len(found) == 26
    assert found["fp8 one code"][:2] == [1, 0]
    assert found["fp8 another shape"][0] is None
    difference, bound, _ = found["w4a16 one code off by one"]
    assert 1.1e-5 > bound > 1e-5
    assert difference > 2 * bound
    assert len(refused) == 5
    assert all(refused.values()), refused


def refusals() -> dict[str, str]:
    import torch

    from qconvert.validators.kernels.triton import amx, fp8, w4a16

    codes, scales = torch.zeros((4, 8), dtype=torch.uint8), torch.zeros((1, 1))
    words, groups = torch.zeros((4, 8), dtype=torch.int32), torch.zeros((4, 2))
    wrong: dict[str, Callable[[], object]] = {
        "grid": lambda: fp8.dequant(codes, scales, (2, 8)),
        "strided columns": lambda: fp8.dequant(codes[:, ::2], scales, (4, 8)),
        "bytes": lambda: amx.unpacked("int4", codes.reshape(-1), torch.zeros(128), 128),
        "groups": lambda: w4a16.product(torch.zeros((1, 64)), words, groups, 16),
        "columns": lambda: w4a16.product(torch.zeros((1, 128))[:, ::2], words, groups, 32),
    }
    found = {}
    for name, call in wrong.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
        else:
            found[name] = ""
    return found


# --- where they run ------------------------------------------------------------------------------


def compiled(cache: str) -> tuple[list[str], str]:
    """Every kernel for a GPU of Ampere's kind; Triton needs none to compile for it. And what
    is said where no GPU is, and Triton was imported to compile."""
    os.environ["TRITON_CACHE_DIR"] = cache
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from qconvert.validation.runner import NotChecked
    from qconvert.validators.kernels.device import device
    from qconvert.validators.kernels.triton import amx, fp8, nvfp4, w4a16

    numbers = (
        "rows", "columns", "tokens", "block_rows", "block_columns", "code_matrix", "code_row",
        "scale_matrix", "scale_row", "out_matrix", "out_row", "x_row", "packed_row",
        "packed_matrix",
    )  # fmt: skip
    strides = dict.fromkeys(numbers, "i64")
    tile: dict[str, object] = {"TALL": 32, "WIDE": 128}
    jobs: list[tuple[Any, dict[str, str], dict[str, object]]] = []
    for kind, scale in ((0, "*fp32"), (1, "*i16"), (2, "*u8")):
        types = {"codes": "*u8", "scales": scale, "out": "*i16"}
        jobs.append((fp8._dequant, types, {"KIND": kind, **tile}))
    for method, step in amx.STEP.items():
        types = {"packed": "*u8", "scales": "*fp32", "out": "*fp32"}
        constants = {"INT4": method == "int4", "STEP": step, "K_BLOCK": 3584, **tile}
        jobs.append((amx._unpack, types, constants))
    for x in ("*bf16", "*fp32"):
        types = {"x": x, "packed": "*i32", "scales": "*i16", "out": "*fp32"}
        sizes = {"TOKENS": 16, "TALL": 64, "WIDE": 32}
        jobs.append((w4a16._multiply, types, {"GROUP": 32, "SHIFT_SCALE": True, **sizes}))
    for divides in (True, False):
        types = {"packed": "*u8", "scales": "*u8", "global_scales": "*fp32", "out": "*i16"}
        jobs.append((nvfp4._dequant, types, {"DIVIDES": divides, **tile}))
    found = []
    for kernel, types, constants in jobs:
        signature = {name: {**strides, **types}.get(name, "constexpr") for name in kernel.arg_names}
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(kernel, signature, places)
        ptx = triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["ptx"]
        assert "e4m3" not in ptx
        assert "tf32" not in ptx
        found.append(kernel.__name__)
    try:
        return found, device()
    except NotChecked as reason:
        return found, str(reason)


@pytest.mark.big
def test_the_kernels_compile_for_gpus(tmp_path: Path) -> None:
    """For Ampere, which has no FP8; no product is computed in TF32. The process has then imported
    Triton without telling it to interpret, and there it cannot any more."""
    found, where = ours("compiled", str(tmp_path))
    assert found == ["_dequant"] * 3 + ["_unpack"] * 2 + ["_multiply"] * 2 + ["_dequant"] * 2
    assert "imported Triton without TRITON_INTERPRET=1" in where


# --- folders -------------------------------------------------------------------------------------


def flip(folder: Path, name: str, at: int = 0, mask: int = 1) -> None:
    """Change bits of one byte of a tensor."""
    for file in folder.glob("*.safetensors"):
        table, data = read_shard(file)
        if name in table:
            raw = bytearray(file.read_bytes())
            raw[len(raw) - len(data) + table[name]["data_offsets"][0] + at] ^= mask
            file.write_bytes(raw)
            return
    raise AssertionError(f"no {name}")


def bf16_experts(hidden: int, intermediate: int, *, awkward: bool) -> Model:
    """Two layers of two experts in BF16, and little else: heavy-tailed, or, where `awkward`, rows of
    all kinds, some of them too large to be multiplied."""
    tensors = {"model.embed_tokens.weight": tensor("BF16", 8, hidden)}
    random, seed = np.random.default_rng(5), 0
    for layer in range(2):
        for expert in range(2):
            for kind in ("gate_proj", "up_proj", "down_proj"):
                shape = (hidden, intermediate) if kind == "down_proj" else (intermediate, hidden)
                plain = amx_rows.bf16(random.standard_t(4, shape) / 16)
                bits = amx_rows.matrix(*shape, seed := seed + 1) if awkward else plain
                name = f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight"
                tensors[name] = Tensor("BF16", shape, bits.tobytes())
    config = {
        "model_type": "qwen3_moe", "hidden_size": hidden, "num_hidden_layers": 2, "num_experts": 2,
        "moe_intermediate_size": intermediate,
    }  # fmt: skip
    return Model(config, tensors)


def made(folder: Path) -> None:
    """Sources, sound outputs of them, and broken ones."""
    model = fp8_moe()
    source = model.write(folder / "fp8")
    convert("dequant", source, folder / "fp8-out")
    flip(copied(folder / "fp8-out", folder / "fp8-broken"), Q, at=5)
    for name in [name for name in model.tensors if ".layers." in name]:
        del model.tensors[name]
    model.config |= {"model_type": "other"}
    for form, grid in (("blocks", (3, 3, 2)), ("tensor", (1,)), ("rows", (3, 10, 1))):
        model.tensors[STACK] = tensor("F8_E4M3", 3, 10, 8)
        model.tensors[f"{STACK}_scale_inv"] = tensor("F32", *grid)
        if form != "blocks":
            model.config["quantization_config"].pop("weight_block_size", None)
        convert("dequant", model.write(folder / form), folder / f"{form}-out")
    flip(copied(folder / "blocks-out", folder / "blocks-broken"), STACK, at=2 * 2 * 10 * 8 + 1)

    bf16_experts(128, 256, awkward=True).write(folder / "experts")
    for method, rounding, numa in (
        ("int4", "peer", 2),
        ("int8", "search", 1),
        ("int4", "search", 1),
    ):
        out = folder / f"{method}-{rounding}"
        words = ["--method", method, "--rounding", rounding, "--numa", str(numa), "--jobs", "1"]
        result = run_cli("amx", folder / "experts", out, *words)
        assert result.code == 0, result.err
    # The scale of row 0 of a shard: its exponent goes up by two.
    flip(copied(folder / "int4-peer", folder / "int4-broken"), f"{TILES}.scale", at=3)
    (folder / "w4a16.yaml").write_text("passes: [w4a16]\n")
    plain = bf16_experts(128, 256, awkward=False).write(folder / "plain")
    result = run_cli("run", folder / "w4a16.yaml", plain, folder / "packed", "--jobs", "1")
    assert result.code == 0, result.err
    broken = copied(folder / "packed", folder / "packed-broken")
    scale = PACKED.replace("packed", "scale")
    for at in (0, 1):  # bf16 0x7FFF or 0xFFFF, a NaN
        data = _bytes_of(broken, scale)
        flip(broken, scale, at=at, mask=data[at] ^ 0xFF)


def _bytes_of(folder: Path, name: str) -> bytes:
    for file in folder.glob("*.safetensors"):
        table, data = read_shard(file)
        if name in table:
            start, stop = table[name]["data_offsets"]
            return data[start:stop]
    raise AssertionError(f"no {name}")


# A run: folder, source, level, layers.
RUNS: tuple[tuple[str, str | None, str, tuple[int, ...] | None], ...] = (
    ("fp8-out", "fp8", "sample", None),
    ("fp8-out", "fp8", "headers", None),
    ("fp8-out", None, "sample", None),
    ("fp8-broken", "fp8", "sample", None),
    ("fp8-broken", "fp8", "sample", (1,)),
    ("fp8-out", "fp8", "sample", (7,)),
    ("blocks-out", "blocks", "sample", None),
    ("tensor-out", "tensor", "sample", None),
    ("rows-out", "rows", "sample", None),
    ("blocks-broken", "blocks", "sample", None),
    ("int4-peer", "experts", "sample", None),
    ("int4-peer", None, "sample", None),
    ("int4-peer", "fp8", "sample", None),
    ("int4-peer", "experts", "headers", None),
    ("int4-peer", "experts", "sample", (5,)),
    ("int8-search", "experts", "sample", None),
    ("int4-search", "experts", "full", (1,)),
    ("int4-broken", "experts", "sample", None),
    ("int4-broken", "experts", "sample", (0,)),
    ("packed", "plain", "sample", None),
    ("packed", None, "headers", None),
    ("packed", None, "sample", (3,)),
    ("packed-broken", None, "sample", None),
)


# Those of tiles, which every `make test` looks at.
TILES_RUNS = (
    ("int4-peer", "experts", "sample", None),
    ("int8-search", "experts", "sample", None),
    ("int4-search", "experts", "full", (1,)),
)


def tiles(folder: str) -> dict[str, Any]:
    return runs(folder, TILES_RUNS)


def everything(folder: str) -> dict[str, Any]:
    return runs(folder, RUNS)


def runs(
    folder: str, asked: Sequence[tuple[str, str | None, str, tuple[int, ...] | None]]
) -> dict[str, Any]:
    """Some of RUNS with one case each of random weights; after all of them the kernels without a folder,
    once as they are and once where nothing fits."""
    from qconvert.validation.runner import Report, Request, validate_folder, validate_kernels
    from qconvert.validators.kernels.device import Case, device

    device()
    short_kernels.shorten()

    def said(report: Report) -> dict[str, Any]:
        return {
            "findings": [asdict(finding) for finding in report.findings],
            "tables": {table.title: asdict(table) for table in report.tables},
            "proved": [text.split()[1] for text in report.proved if text.split()[1] in OURS],
        }

    found = {}
    for out, against, level, layers in asked:
        source = None if against is None else str(Path(folder, against))
        request = Request(level=level, layers=layers, kernels=True, jobs=1)  # type: ignore[arg-type]
        report = validate_folder(Path(folder, out), source, request=request)
        found[_key(out, against, level, layers)] = said(report)
    if asked is not RUNS:
        return found
    found["alone"] = said(validate_kernels())
    for module in short_kernels.modules():
        module.random_cases = lambda device: iter([Case("a case", 3.0, 0.0)])  # type: ignore[attr-defined]
    found["nothing fits"] = said(validate_kernels())
    return found


def _key(out: str, against: str | None, level: str, layers: tuple[int, ...] | None) -> str:
    return f"{out} {against} {level} {layers}"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """All runs take three times as long as those of tiles."""
    folder = tmp_path_factory.mktemp("kernels")
    made(folder)
    here = [item for item in request.session.items if item.path == Path(__file__)]
    every = any(item.get_closest_marker("big") for item in here)
    return ours("everything" if every else "tiles", str(folder))


def of(
    found: Any,
    out: str,
    against: str | None,
    level: str = "sample",
    layers: tuple[int, ...] | None = None,
) -> Any:
    return found[_key(out, against, level, layers)]


def rows_of(said: Any, kernel: str) -> list[list[str]]:
    """A table's rows for tensors of the folder."""
    rows: list[list[str]] = said["tables"][f"kernel {kernel}"]["rows"]
    assert rows[0][0].startswith("random weights, the worst of 1: ")
    assert {row[3] for row in rows} == {"Triton's interpreter"}
    return rows[1:]


def wrong(said: Any) -> list[tuple[str, str]]:
    """Rules and tensors of our findings; others speak of the same damage in their own words."""
    pairs = [(finding["rule"], finding["where"]) for finding in said["findings"]]
    return [pair for pair in pairs if pair[0] in ("QC071", "QC072", "QC073")]


def note(said: Any, kernel: str) -> str:
    text: str = said["tables"][f"kernel {kernel}"]["note"]
    return text


@pytest.mark.big
def test_fp8_against_the_output(found: Any) -> None:
    said = of(found, "fp8-out", "fp8")
    rows = rows_of(said, "fp8_dequant")
    # Both layers; of q, k, v, o the one there is; of two experts three matrices each.
    assert len(rows) == 2 * (4 + 2 * 3)
    assert all(row[1:3] == ["0", "bitwise"] for row in rows)
    assert f"{Q}, 8 x 8" in [row[0] for row in rows]
    assert wrong(said) == []
    assert said["proved"] == sorted(OURS)
    assert note(said, "fp8_dequant") == ""
    assert note(said, "w4a16") == "the folder holds no packed INT4 weights"
    assert note(said, "amx_tiles") == "the folder holds no AMX tiles"


@pytest.mark.big
def test_fp8_that_the_output_has_otherwise(found: Any) -> None:
    said = of(found, "fp8-broken", "fp8")
    assert wrong(said) == [("QC071", Q)]
    assert [row[1] for row in rows_of(said, "fp8_dequant")].count("1") == 1
    assert said["proved"] == ["amx_tiles", "w4a16"]
    assert wrong(of(found, "fp8-broken", "fp8", layers=(1,))) == []


@pytest.mark.big
def test_what_was_not_looked_at_stands_in_the_note(found: Any) -> None:
    for out, against, level, layers, kernel, text in (
        ("fp8-out", "fp8", "headers", None, "fp8_dequant", "give --level sample"),
        ("fp8-out", None, "sample", None, "fp8_dequant", "give --against SRC"),
        ("fp8-out", "fp8", "sample", (7,), "fp8_dequant", "the layers asked for hold no FP8"),
        ("packed", "plain", "sample", None, "fp8_dequant", "no FP8 matrix of the source"),
        ("int4-peer", "experts", "headers", None, "amx_tiles", "give --level sample"),
        ("int4-peer", "experts", "sample", (5,), "amx_tiles", "the layers asked for"),
        ("packed", None, "headers", None, "w4a16", "give --level sample"),
        ("packed", None, "sample", (3,), "w4a16", "the layers asked for"),
    ):
        said = of(found, out, against, level, layers)
        assert text in note(said, kernel), (out, kernel)
        assert rows_of(said, kernel) == []


@pytest.mark.big
@pytest.mark.parametrize(("form", "whole"), [("blocks", False), ("tensor", True), ("rows", False)])
def test_stacks_of_fp8(found: Any, form: str, whole: bool) -> None:
    """The first and the last expert; under one scale for all, the stack as it lies."""
    said = of(found, f"{form}-out", form)
    names = [f"{STACK}, 30 x 8"] if whole else [f"{STACK}[{i}], 10 x 8" for i in (0, 2)]
    assert [row[:3] for row in rows_of(said, "fp8_dequant")] == [
        [name, "0", "bitwise"] for name in names
    ]
    assert wrong(said) == []


@pytest.mark.big
def test_a_stack_s_last_expert_is_looked_at(found: Any) -> None:
    assert wrong(of(found, "blocks-broken", "blocks")) == [("QC071", f"{STACK}[2]")]


@pytest.mark.parametrize(
    ("out", "level", "layers", "shards"),
    [  # TILES_RUNS
        ("int4-peer", "sample", None, 24),
        ("int8-search", "sample", None, 12),
        ("int4-search", "full", (1,), 6),
    ],
)
def test_tiles(
    found: Any, out: str, level: str, layers: tuple[int, ...] | None, shards: int
) -> None:
    said = of(found, out, "experts", level, layers)
    rows = rows_of(said, "amx_tiles")
    ways = [row[0].rpartition(", ")[2] for row in rows]
    assert ways == ["torch", "numpy", "source"] * shards
    assert all(row[1] == "0" for row in rows if row[2] == "bitwise")
    assert all(0.4 < float(row[1]) <= float(row[2]) < 0.54 for row in rows if row[2] != "bitwise")
    assert wrong(said) == []
    assert note(said, "amx_tiles") == ""
    assert "amx_tiles" in said["proved"]


@pytest.mark.big
def test_tiles_without_the_source(found: Any) -> None:
    alone = of(found, "int4-peer", None)
    assert {row[2] for row in rows_of(alone, "amx_tiles")} == {"bitwise"}
    assert "--against SRC" in note(alone, "amx_tiles")
    another = of(found, "int4-peer", "fp8")
    assert "not compared with the source: QC043" in note(another, "amx_tiles")


@pytest.mark.big
def test_tiles_too_far_from_the_source(found: Any) -> None:
    assert wrong(of(found, "int4-broken", "experts")) == [("QC072", f"{TILES}.weight")]
    assert wrong(of(found, "int4-broken", "experts", layers=(0,))) == []


@pytest.mark.big
def test_packed_int4(found: Any) -> None:
    said = of(found, "packed", "plain")
    rows = rows_of(said, "w4a16")
    assert len(rows) == 2 * 2 * 3
    assert f"{PACKED}, 256 x 128, 7 tokens bf16" in [row[0] for row in rows]
    assert all(0 < float(row[1]) < float(row[2]) for row in rows)
    assert wrong(said) == []
    assert said["proved"] == sorted(OURS)


@pytest.mark.big
def test_packed_int4_whose_scale_is_no_number(found: Any) -> None:
    said = of(found, "packed-broken", None)
    assert wrong(said) == [("QC073", PACKED)]
    (message,) = [f["message"] for f in said["findings"] if f["rule"] == "QC073"]
    assert "is not a number" in message


@pytest.mark.big
def test_kernels_without_a_folder(found: Any) -> None:
    said = found["alone"]
    assert set(OURS) <= set(said["proved"])
    assert all(rows_of(said, kernel) == [] for kernel in OURS)
    said = found["nothing fits"]
    pairs = dict(zip(OURS, ("QC071", "QC072", "QC073"), strict=True))
    assert sorted(wrong(said)) == sorted((rule, f"kernel {name}") for name, rule in pairs.items())
    assert not set(OURS) & set(said["proved"])
    (message,) = [f["message"] for f in said["findings"] if f["rule"] == "QC071"]
    assert message == "a case: expected equal bits, found 3 that differ (Triton's interpreter)"


if __name__ == "__main__":
    tasks: dict[str, Callable[..., Any]] = {
        task.__name__: task for task in (wrong_inputs, compiled, tiles, everything)
    }
    result = tasks[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(result).replace("NaN", "null"))
