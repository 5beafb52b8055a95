"""The Triton kernel for FP8 in the interpreter: it gives what its reference gives on random weights,
wrong inputs show, it compiles for GPUs, and `--kernels` says of a folder what it found (that for fused
linear attention: test_gdn_fused.py).

Each runs in a process of its own: Triton decides when it is imported whether it interprets, and in a
test process others may have imported it. On a GPU: `python tests/kernel_matrix.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import short_kernels
from checkpoints import convert, copied, fp8_moe, read_shard, tensor

Q = "model.layers.0.self_attn.q_proj.weight"
STACK = "model.layers.0.mlp.experts.gate_up_proj"
OURS = "fp8_dequant"


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
def test_kernel_and_reference_agree() -> None:
    matrix = Path(__file__).with_name("kernel_matrix.py")
    lines = child(matrix, "fp8", interpret=True).splitlines()
    assert lines[0].startswith("# Triton's interpreter, triton ")
    assert lines[-1] == "# all fit"
    assert len([line for line in lines if line.startswith("fp8\tfits\t")]) >= 30


def wrong_inputs() -> tuple[dict[str, tuple[float, float, bool]], dict[str, str]]:
    """The kernel on inputs that are not the reference's, and what it says of those of wrong shapes."""
    from qconvert.validators.kernels.device import Case, bitwise, device

    where = device()
    import torch

    from qconvert.validators.kernels.triton import fp8

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

    assert where == "cpu"
    return {case.name: (case.difference, case.bound, case.fits) for case in found}, refusals()


@pytest.mark.big
def test_wrong_inputs_show() -> None:
    found, refused = ours("wrong_inputs")
    fitting = {name for name, (_, _, fits) in found.items() if fits}
    assert fitting == {"fp8 as it is"}
    assert len(found) == 6
    assert found["fp8 one code"][:2] == [1, 0]
    assert found["fp8 another shape"][0] is None
    assert len(refused) == 2
    assert all(refused.values()), refused


def refusals() -> dict[str, str]:
    import torch

    from qconvert.validators.kernels.triton import fp8

    codes, scales = torch.zeros((4, 8), dtype=torch.uint8), torch.zeros((1, 1))
    wrong: dict[str, Callable[[], object]] = {
        "grid": lambda: fp8.dequant(codes, scales, (2, 8)),
        "strided columns": lambda: fp8.dequant(codes[:, ::2], scales, (4, 8)),
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
    """The kernel for a GPU of Ampere's kind, with scales of each dtype; Triton needs none to compile for
    it. And what is said where no GPU is, and Triton was imported to compile."""
    os.environ["TRITON_CACHE_DIR"] = cache
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from qconvert.validation.runner import NotChecked
    from qconvert.validators.kernels.device import device
    from qconvert.validators.kernels.triton import fp8

    found = []
    for kind, scale in ((0, "*fp32"), (1, "*i16"), (2, "*u8")):
        types = {"codes": "*u8", "scales": scale, "out": "*i16"}
        constants = {"KIND": kind, "TALL": 32, "WIDE": 128}
        names = fp8._dequant.arg_names
        signature = {
            name: "constexpr" if name in constants else types.get(name, "i64") for name in names
        }
        places = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fp8._dequant, signature, places)
        ptx = triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["ptx"]
        assert "e4m3" not in ptx
        found.append(fp8._dequant.__name__)
    try:
        return found, device()
    except NotChecked as reason:
        return found, str(reason)


@pytest.mark.big
def test_the_kernel_compiles_for_gpus(tmp_path: Path) -> None:
    """For Ampere, which has no FP8. The process has then imported Triton without telling it to
    interpret, and there it cannot any more."""
    found, where = ours("compiled", str(tmp_path))
    assert found == ["_dequant"] * 3
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
    ("fp8-out", "fp8-out", "sample", None),
)


def everything(folder: str) -> dict[str, Any]:
    """RUNS with one case of random weights each; then the kernels without a folder, once as they are and
    once where nothing fits."""
    from qconvert.validation.runner import Report, Request, validate_folder, validate_kernels
    from qconvert.validators.kernels.device import Case, device

    device()
    short_kernels.shorten()

    def said(report: Report) -> dict[str, Any]:
        return {
            "findings": [asdict(finding) for finding in report.findings],
            "tables": {table.title: asdict(table) for table in report.tables},
            "proved": f"kernel {OURS} gives" in " ".join(report.proved),
        }

    found = {}
    for out, against, level, layers in RUNS:
        source = None if against is None else str(Path(folder, against))
        request = Request(level=level, layers=layers, kernels=True, jobs=1)  # type: ignore[arg-type]
        report = validate_folder(Path(folder, out), source, request=request)
        found[_key(out, against, level, layers)] = said(report)
    found["alone"] = said(validate_kernels())
    for module in short_kernels.modules():
        module.random_cases = lambda device: iter([Case("a case", 3.0, 0.0)])  # type: ignore[attr-defined]
    found["nothing fits"] = said(validate_kernels())
    return found


def _key(out: str, against: str | None, level: str, layers: tuple[int, ...] | None) -> str:
    return f"{out} {against} {level} {layers}"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("kernels")
    made(folder)
    return ours("everything", str(folder))


def of(
    found: Any,
    out: str,
    against: str | None,
    level: str = "sample",
    layers: tuple[int, ...] | None = None,
) -> Any:
    return found[_key(out, against, level, layers)]


def rows_of(said: Any) -> list[list[str]]:
    """The table's rows for tensors of the folder."""
    rows: list[list[str]] = said["tables"][f"kernel {OURS}"]["rows"]
    assert rows[0][0].startswith("random weights, the worst of 1: ")
    assert {row[3] for row in rows} == {"Triton's interpreter"}
    return rows[1:]


def wrong(said: Any) -> list[str]:
    """Tensors of our findings; others speak of the same damage in their own words."""
    return [finding["where"] for finding in said["findings"] if finding["rule"] == "QC071"]


def note(said: Any) -> str:
    text: str = said["tables"][f"kernel {OURS}"]["note"]
    return text


def test_fp8_against_the_output(found: Any) -> None:
    said = of(found, "fp8-out", "fp8")
    rows = rows_of(said)
    # Both layers; of q, k, v, o the one there is; of two experts three matrices each.
    assert len(rows) == 2 * (4 + 2 * 3)
    assert all(row[1:3] == ["0", "bitwise"] for row in rows)
    assert f"{Q}, 8 x 8" in [row[0] for row in rows]
    assert (wrong(said), said["proved"], note(said)) == ([], True, "")


def test_fp8_that_the_output_has_otherwise(found: Any) -> None:
    said = of(found, "fp8-broken", "fp8")
    assert (wrong(said), said["proved"]) == ([Q], False)
    assert [row[1] for row in rows_of(said)].count("1") == 1
    assert wrong(of(found, "fp8-broken", "fp8", layers=(1,))) == []


def test_what_was_not_looked_at_stands_in_the_note(found: Any) -> None:
    for out, against, level, layers, text in (
        ("fp8-out", "fp8", "headers", None, "give --level sample"),
        ("fp8-out", None, "sample", None, "give --against SRC"),
        ("fp8-out", "fp8", "sample", (7,), "the layers asked for hold no FP8"),
        ("fp8-out", "fp8-out", "sample", None, "no FP8 matrix of the source"),
    ):
        said = of(found, out, against, level, layers)
        assert text in note(said)
        assert rows_of(said) == []


@pytest.mark.parametrize(("form", "whole"), [("blocks", False), ("tensor", True), ("rows", False)])
def test_stacks_of_fp8(found: Any, form: str, whole: bool) -> None:
    """The first and the last expert; under one scale for all, the stack as it lies."""
    said = of(found, f"{form}-out", form)
    names = [f"{STACK}, 30 x 8"] if whole else [f"{STACK}[{i}], 10 x 8" for i in (0, 2)]
    assert [row[:3] for row in rows_of(said)] == [[name, "0", "bitwise"] for name in names]
    assert wrong(said) == []


def test_a_stack_s_last_expert_is_looked_at(found: Any) -> None:
    assert wrong(of(found, "blocks-broken", "blocks")) == [f"{STACK}[2]"]


def test_kernels_without_a_folder(found: Any) -> None:
    said = found["alone"]
    assert (said["proved"], rows_of(said)) == (True, [])
    said = found["nothing fits"]
    assert (wrong(said), said["proved"]) == ([f"kernel {OURS}"], False)
    (message,) = [f["message"] for f in said["findings"] if f["rule"] == "QC071"]
    assert message == "a case: expected equal bits, found 3 that differ (Triton's interpreter)"


if __name__ == "__main__":
    tasks: dict[str, Callable[..., Any]] = {
        task.__name__: task for task in (wrong_inputs, compiled, everything)
    }
    result = tasks[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(result).replace("NaN", "null"))
