"""AMX tiles cut for another number of NUMA nodes, without the model: against the tiles that conversion
of the model for that number makes, and by the validators' reader, which shares no code with the pass."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import amx_rows
import numpy as np
import pytest
from checkpoints import copied, edit_json, run_cli
from kt_experts import made, moe, ours
from kt_machine import needs_avx512
from ops_harness import buffer, run_op
from safetensors.numpy import load_file, save_file

from qconvert.checkpoint.checkpoint import MANIFEST, RECEIPT
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError
from qconvert.formats.amx.format import Method
from qconvert.formats.amx.recut import Recut
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Report, Request, validate_folder
from qconvert.validators.reading.amx import STEP, tile_codes

METHODS: list[Method] = ["int4", "int8"]
LIMITS = (None, 1, 300_000)


def recut(
    method: Method, before: int, after: int, tiles: list[bytes], limit: int | None = None
) -> list[bytes]:
    """The op, on codes and scale of each shard in turn."""
    dtypes = ("I8", 1), ("F32", 4)
    ins = [
        buffer(TensorType(dtype, (len(data) // size,)), data)
        for data, (dtype, size) in zip(tiles, dtypes * before, strict=True)
    ]
    found, remarks = run_op(Recut(method, before, after), ins, limit)
    assert not remarks
    return found


def numbers(method: Method, tiles: list[bytes], columns: int) -> tuple[Any, Any]:
    """Codes [N, K] and scales [shards, N], by the reader of the validators."""
    scales = np.stack([np.frombuffer(scale, np.float32) for scale in tiles[1::2]])
    wide = columns // len(scales)
    codes = [
        tile_codes(method, np.frombuffer(part, np.uint8), scales.shape[1], wide)
        for part in tiles[::2]
    ]
    return np.concatenate(codes, axis=1).astype(np.float64), scales


# --- One matrix ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (1, 4), (3, 6)])
def test_finer_keeps_every_number_and_back_every_byte(
    method: Method, before: int, after: int
) -> None:
    columns = 12 * STEP[method]
    tiles = ours(method, before, "down", amx_rows.matrix(256, columns, seed=3))
    for limit in LIMITS:
        finer = recut(method, before, after, tiles, limit)
        codes, scales = numbers(method, tiles, columns)
        found, found_scales = numbers(method, finer, columns)
        assert np.array_equal(found, codes)
        assert np.array_equal(found_scales, np.repeat(scales, after // before, axis=0))
        assert recut(method, after, before, finer, limit) == tiles


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (4, 2), (4, 1), (2, 3), (3, 2), (6, 4)])
def test_coarser_rounds_to_the_largest_scale(method: Method, before: int, after: int) -> None:
    """Formula in float64, which rounds as float32 does but where a product is next to a half."""
    columns = 12 * STEP[method]
    tiles = ours(method, before, "down", amx_rows.matrix(128, columns, seed=4))
    codes, scales = numbers(method, tiles, columns)
    for limit in LIMITS:
        found, found_scales = numbers(method, recut(method, before, after, tiles, limit), columns)
        old, new = columns // before, columns // after
        for shard in range(after):
            spanned = sorted({column // old for column in range(shard * new, (shard + 1) * new)})
            step = scales[spanned].max(axis=0)
            assert np.array_equal(found_scales[shard], step)
            for column in range(shard * new, (shard + 1) * new):
                own = scales[column // old].astype(np.float64)
                with np.errstate(all="ignore"):
                    exact = np.where(step > 0, codes[:, column] * own / step, 0)
                assert (np.abs(found[:, column] - exact) <= 0.5 + 1e-4).all()
                same = own == step
                assert np.array_equal(
                    found[same, column], np.where(step > 0, codes[:, column], 0)[same]
                )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_columns_beyond_a_k_block(method: Method, before: int, after: int) -> None:
    """7,680 columns are two K blocks of 3,584 and a part of one; half of them one and a part."""
    columns = 7680
    bits = amx_rows.matrix(STEP[method], columns, seed=5)
    tiles = ours(method, before, "down", bits)
    codes, scales = numbers(method, tiles, columns)
    found, found_scales = numbers(method, recut(method, before, after, tiles), columns)
    step = np.repeat(found_scales, columns // after, axis=0).T.astype(np.float64)
    old = np.repeat(scales, columns // before, axis=0).T.astype(np.float64)
    assert (np.abs(found * step - codes * old) <= (0.5 + 1e-4) * step * (before > after)).all()


@pytest.mark.parametrize("method", METHODS)
def test_merged_scales_are_the_converters_own(method: Method) -> None:
    """The whole row's scale is the largest of its parts' scales; where a part has it, its codes are the
    whole row's as well."""
    columns = 8 * STEP[method]
    bits = amx_rows.matrix(256, columns, seed=6)
    whole, whole_scales = numbers(method, ours(method, 1, "down", bits), columns)
    parts = ours(method, 2, "down", bits)
    found, found_scales = numbers(method, recut(method, 2, 1, parts), columns)
    assert np.array_equal(found_scales, whole_scales)
    _, scales = numbers(method, parts, columns)
    for shard in range(2):
        same = scales[shard] == whole_scales[0]
        half = slice(shard * columns // 2, (shard + 1) * columns // 2)
        assert same.any()
        assert np.array_equal(found[same, half], whole[same, half])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_a_scale_that_is_none_is_refused_with_its_row(bad: float) -> None:
    tiles = ours("int8", 2, "down", amx_rows.matrix(128, 256, seed=7))
    scales = np.frombuffer(tiles[3], np.float32).copy()
    scales[70] = bad
    for limit in (None, 1):
        with pytest.raises(RowError, match="has a scale that is not finite, or below 0") as caught:
            recut("int8", 2, 1, [*tiles[:3], scales.tobytes()], limit)
        assert caught.value.row == (70 if limit is None else 6)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ([("I8", 8192), ("F32", 64)], "2 NUMA shards alike"),
        ([("I8", 8192), ("F32", 64), ("I8", 4096), ("F32", 64)], "2 NUMA shards alike"),
        ([("I8", 8192), ("F16", 64)] * 2, "2 NUMA shards alike"),
        ([("U8", 8192), ("F32", 64)] * 2, "rows in multiples of 64"),
        ([("I8", 8192), ("F32", 32)] * 2, "rows in multiples of 64"),
        ([("I8", 4096), ("F32", 64)] * 2, "for 2 and for 4 NUMA shards, found 128"),
    ],
)
def test_shards_that_do_not_fit_are_refused(args: list[tuple[str, int]], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        Recut("int8", 2, 4).infer(*[TensorType(dtype, (size,)) for dtype, size in args])


# --- Folders ---------------------------------------------------------------------------------------

HIDDEN, INTERMEDIATE = 128, 512


@pytest.fixture(autouse=True)
def _without_client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the tests that ask it, kt-kernel is not found: it takes seconds."""
    find = importlib.util.find_spec
    if request.node.get_closest_marker("peer") is None:
        monkeypatch.setattr(
            importlib.util, "find_spec",
            lambda name, package=None: None if name == "kt_kernel" else find(name, package),
        )  # fmt: skip


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = tmp_path_factory.mktemp("recut")
    moe(HIDDEN, INTERMEDIATE, experts=2).write(room / "model")
    for method in METHODS:
        for numa in (1, 2, 4):
            made(room / "model", room / f"{method}-{numa}", method, numa=numa)
    return room


def split(source: Path, out: Path, numa: int, *more: str) -> Path:
    done = run_cli("split", source, out, "--numa", str(numa), "--jobs", "1", *more)
    assert done.code == 0, done.err
    return out


def tensors(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def report(out: Path, against: Path) -> Report:
    return validate_folder(out, str(against), request=Request("full", jobs=1))


def errors(out: Path, against: Path) -> list[Finding]:
    return [one for one in report(out, against).findings if one.severity == "error"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("before", "after"), [(2, 4), (1, 2), (4, 1), (2, 1)])
def test_a_folder_is_that_of_its_model_but_for_down(
    room: Path, tmp_path: Path, method: Method, before: int, after: int
) -> None:
    source = room / f"{method}-{before}"
    out = split(source, tmp_path / "out", after)
    found, wanted = tensors(out), tensors(room / f"{method}-{after}")
    assert found.keys() == wanted.keys()
    for name, values in found.items():
        if "_down_" not in name or (before > after and name.endswith(".scale")):
            assert np.array_equal(values, wanted[name]), name
    fact = json.loads((out / MANIFEST).read_text())["amx"]
    stated = json.loads((room / f"{method}-{after}" / MANIFEST).read_text())["amx"]
    identity = json.loads((source / MANIFEST).read_text())["identity"]
    cut = {
        "source": identity["source"],
        "source_sample": identity["source_sample"],
        "numa": [before],
    }
    assert fact == {**stated, "cut_from": cut}
    assert f"--kt-threadpool-count {after} " in (out / "README.md").read_text()
    checked = report(out, source)
    assert not checked.findings
    assert any("within the format's rounding" in line for line in checked.proved)
    losses = json.loads((out / MANIFEST).read_text())["lossy_steps"]
    assert bool(losses) == (before > after)


@pytest.mark.peer
@needs_avx512
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1)])
def test_kt_kernels_client_computes_with_them(
    room: Path, tmp_path: Path, method: Method, before: int, after: int
) -> None:
    """As with the tiles before, whose weights the result is compared with."""
    source = room / f"{method}-{before}"
    checked = report(split(source, tmp_path / "out", after), source)
    assert not checked.findings
    assert any(line.startswith("kt-kernel loads the experts") for line in checked.proved)


@pytest.mark.parametrize("method", METHODS)
def test_finer_and_back_is_the_same_folder_of_tensors(
    room: Path, tmp_path: Path, method: Method
) -> None:
    source = room / f"{method}-2"
    finer = split(source, tmp_path / "finer", 4)
    back = split(finer, tmp_path / "back", 2)
    for name, values in tensors(source).items():
        assert np.array_equal(values, tensors(back)[name]), name
    assert json.loads((back / MANIFEST).read_text())["amx"]["cut_from"]["numa"] == [2, 4]
    assert not report(back, finer).findings


def test_tiles_of_kt_kernels_own_converter_have_no_manifest(room: Path, tmp_path: Path) -> None:
    foreign = copied(room / "int4-2", tmp_path / "foreign")
    for name in (MANIFEST, RECEIPT, "README.md"):
        (foreign / name).unlink()
    out = split(foreign, tmp_path / "out", 4)
    again = split(room / "int4-2", tmp_path / "again", 4)
    assert all(
        np.array_equal(values, tensors(again)[name]) for name, values in tensors(out).items()
    )
    assert not report(out, foreign).findings


def test_a_dry_run_writes_nothing_and_says_what_is_lost(room: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run_cli("split", room / "int4-4", out, "--numa", "1", "--dry-run")
    assert done.code == 0, done.err
    assert not out.exists()
    assert "rounds down_proj of experts again, to scales of 1 NUMA shards in place of 4" in done.out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--numa", "2"], "cut for 2 NUMA nodes already"),
        (["--numa", "3"], "supported counts: 1, 2, 4"),
        ([], "say how to cut"),
        (["--numa", "4", "--pp", "2"], "say how to cut"),
        (["--numa", "4", "--balance"], "--balance is of pipeline stages"),
        (["--numa", "4", "--recipe", "copy"], "--recipe is of pipeline stages"),
    ],
)
def test_cuts_that_are_refused(room: Path, tmp_path: Path, words: list[str], why: str) -> None:
    done = run_cli("split", room / "int4-2", tmp_path / "out", *words)
    assert done.code != 0
    assert why in done.err
    assert not (tmp_path / "out").exists()


def test_a_model_is_no_folder_of_tiles(room: Path, tmp_path: Path) -> None:
    done = run_cli("split", room / "model", tmp_path / "out", "--numa", "2")
    assert done.code == 1
    assert "expected a folder of AMX tiles" in done.err
    done = run_cli("amx", room / "int4-2", tmp_path / "out", "--method", "int4", "--numa", "4")
    assert "qconvert split --numa" in done.err


def _without(name: str) -> Any:
    def change(held: dict[str, Any]) -> None:
        del held[name]

    return change


def _shorter(name: str) -> Any:
    def change(held: dict[str, Any]) -> None:
        held[name] = held[name][:-1]

    return change


def _beside(held: dict[str, Any]) -> None:
    held["model.norm.weight"] = np.zeros(128, np.float32)


_NAME = "blk.1.ffn_down_exps.1.numa.1.weight"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_without(_NAME), f"'{_NAME}': expected I8"),
        (_shorter(_NAME), f"'{_NAME}': expected I8"),
        (_beside, "'model.norm.weight': expected the tiles of experts alone"),
    ],
)
def test_broken_tiles_are_refused_by_name(
    room: Path, tmp_path: Path, change: Any, why: str
) -> None:
    broken = copied(room / "int4-2", tmp_path / "broken")
    held = tensors(broken)
    change(held)
    for file in broken.glob("*.safetensors*"):
        file.unlink()
    save_file(held, broken / "model.safetensors")
    done = run_cli("split", broken, tmp_path / "out", "--numa", "4")
    assert done.code == 1
    assert why in done.err


def test_a_manifest_that_says_something_else_is_refused(room: Path, tmp_path: Path) -> None:
    broken = copied(room / "int4-2", tmp_path / "broken")
    edit_json(broken / MANIFEST, lambda found: found["amx"].update(numa=4))
    done = run_cli("split", broken, tmp_path / "out", "--numa", "1")
    assert done.code == 1
    assert "expected numa to be 2, as the tensors are, found 4" in done.err


# --- What validation finds -------------------------------------------------------------------------


@pytest.fixture
def cut(room: Path, tmp_path: Path) -> tuple[Path, Path]:
    return split(room / "int8-2", tmp_path / "out", 1), room / "int8-2"


def _write(out: Path, name: str, values: Any) -> None:
    """Change a tensor where it lies. The receipt's rules, which see that, are not looked at."""
    (file,) = out.glob("*.safetensors")
    held = load_file(file)
    assert held[name].nbytes == values.nbytes
    save_file({**held, name: values}, file)


def _rules(out: Path, source: Path) -> set[tuple[str, str]]:
    found = {(one.rule, one.where) for one in errors(out, source)}
    return {one for one in found if one[0].startswith("QC04")}


@pytest.mark.parametrize("kind", ["gate", "up"])
def test_rows_that_changed_are_found(cut: tuple[Path, Path], kind: str) -> None:
    out, source = cut
    name = f"blk.1.ffn_{kind}_exps.1.numa.0"
    values = tensors(out)[f"{name}.weight"].copy()
    values[-1] ^= 1
    _write(out, f"{name}.weight", values)
    assert _rules(out, source) == {("QC042", f"{name}.weight")}


def test_a_step_that_is_not_the_largest_is_found(cut: tuple[Path, Path]) -> None:
    out, source = cut
    name = "blk.0.ffn_down_exps.1.numa.0"
    values = tensors(out)[f"{name}.scale"].copy()
    values[5] = np.nextafter(values[5], np.float32(1))
    _write(out, f"{name}.scale", values)
    assert _rules(out, source) == {("QC042", f"{name}.weight")}


def test_a_code_that_is_one_off_is_found(cut: tuple[Path, Path]) -> None:
    out, source = cut
    name = "blk.0.ffn_down_exps.0.numa.0.weight"
    values = tensors(out)[name].copy()
    values[100] += 1 if values[100] < 127 else -1
    _write(out, name, values)
    assert _rules(out, source) == {("QC042", name)}


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("cut_from", {"numa": [4]}, "the NUMA counts before"),
        ("rounding", "search", "the rounding"),
        ("experts", 1, "the number of experts"),
    ],
)
def test_what_the_manifest_says_is_compared(
    cut: tuple[Path, Path], key: str, value: Any, what: str
) -> None:
    out, source = cut
    edit_json(out / MANIFEST, lambda found: found["amx"].update({key: value}))
    found = [one for one in errors(out, source) if one.rule == "QC043"]
    assert [what in one.message for one in found] == [True]


def test_against_the_model_it_says_which_folder_to_give(cut: tuple[Path, Path]) -> None:
    out, source = cut
    found = report(out, source.parent / "model")
    assert any("give --against the folder of those" in line for line in found.not_checked)
    assert "QC031" in {one.rule for one in found.findings}
