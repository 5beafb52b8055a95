"""What a run leaves: the right bytes in the right files, or nothing and a sentence saying why."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import struct
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import faults
import pytest
import torch
import xxhash
from faults import InTurn, convert, differing, plan_of, tree
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from qconvert.checkpoint.checkpoint import INDEX, MANIFEST, RECEIPT, SINGLE, WORK_DIR, Checkpoint
from qconvert.checkpoint.safetensors import read_header
from qconvert.cli.demo import write_sample
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import CheckpointError, OutputError, PlanError, RunError
from qconvert.core.graph import Buffer, Output, Part, apply, concat, whole
from qconvert.core.names import natural_key
from qconvert.formats.fp8.decode import DequantFp8
from qconvert.plan.plan import Plan
from qconvert.run.executor import execute
from qconvert.run.folder import workspace
from qconvert.run.folder.prepare import prepare
from qconvert.run.work.files import Files
from qconvert.run.work.memory import PLAN_BYTES_PER_TENSOR
from qconvert.run.work.options import RunOptions

HERE = RunOptions(jobs=1)
MIB = 1 << 20


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.write_small(tmp_path_factory.mktemp("small") / "source")


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample") / "source"
    write_sample(folder, shards=3)
    return folder


def _stored(folder: Path) -> dict[str, tuple[TensorType, bytes]]:
    """Every tensor of a finished folder: its type and its bytes, read without qconvert's runner."""
    found = {}
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        for name, kind, at in read_header(file).entries:
            assert name not in found
            found[name] = kind, data[at : at + kind.nbytes]
    return found


def _decoded(codes: bytes, factors: bytes, shape: tuple[int, int]) -> bytes:
    """bf16(fp32(w) * fp32(s)), with torch's own cast and scales spread out in full."""
    values = torch.frombuffer(bytearray(codes), dtype=torch.float8_e4m3fn).view(shape).float()
    spread = torch.frombuffer(bytearray(factors), dtype=torch.float32).view(faults.grid(shape))
    for dim in (0, 1):
        spread = spread.repeat_interleave(faults.BLOCK, dim)
    result = (values * spread[: shape[0], : shape[1]]).bfloat16()
    return result.view(torch.uint8).numpy().tobytes()


def _receipt(folder: Path) -> list[dict[str, object]]:
    *lines, seal = (folder / RECEIPT).read_bytes().splitlines(keepends=True)
    assert json.loads(seal) == {
        "receipt": {"lines": len(lines), "xxh3": xxhash.xxh3_128(b"".join(lines)).hexdigest()}
    }
    return [json.loads(line) for line in lines]


# --- the bytes --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def converted(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small checkpoint, by default options in this process."""
    out = tmp_path_factory.mktemp("converted") / "out"
    convert(small, out, HERE)
    return out


def test_every_byte_is_right(converted: Path) -> None:
    tensors = faults.small_tensors()
    wanted = {}
    for name, (kind, data) in tensors.items():
        if kind.dtype == "F8_E4M3":
            rows, columns = kind.shape
            bf16 = _decoded(data, tensors[f"{name}_scale_inv"][1], (rows, columns))
            wanted[name] = TensorType("BF16", kind.shape), bf16
        elif not name.endswith("_scale_inv"):
            wanted[name] = kind, data
    assert _stored(converted) == wanted


@pytest.mark.parametrize("size", [5_000_000_000, 400_000])
def test_workers_make_the_same_files(sample: Path, tmp_path: Path, size: int) -> None:
    shares = []
    for jobs in (1, 3):
        how = RunOptions(jobs=jobs, memory=512 * MIB, max_shard_size=size)
        receipt = execute(plan_of(sample), tmp_path / f"{jobs}", how)
        assert receipt.share is not None
        shares.append(receipt.share.jobs)
    assert shares == [1, 3]
    assert differing(tree(tmp_path / "1"), tree(tmp_path / "3")) == []


def test_memory_does_not_change_bytes(sample: Path, tmp_path: Path) -> None:
    plan = plan_of(sample)
    arenas = set()
    for memory in (_smallest(plan), 40 * MIB, 2048 * MIB):
        out = tmp_path / str(memory)
        receipt = execute(plan, out, RunOptions(jobs=1, memory=memory))
        assert receipt.share is not None
        arenas.add(receipt.share.arena)
        assert differing(tree(out), tree(tmp_path / str(_smallest(plan)))) == []
    assert len(arenas) > 1


def test_many_small_units_do_not_stall_the_workers(tmp_path: Path) -> None:
    """Work for the workers and their results fill the pipes both ways at once."""
    long = "x" * 300
    tensors = {f"{long}.{i}.weight": faults.plain((2,), i) for i in range(3000)}
    source = faults.write_checkpoint(tmp_path / "source", tensors, quantized=False)
    plan = Plan.identity(Checkpoint.open(source))
    execute(plan, tmp_path / "out", RunOptions(jobs=2, memory=512 * MIB))
    assert _stored(tmp_path / "out") == tensors


# --- the files --------------------------------------------------------------------------------


def _mixed() -> dict[str, tuple[TensorType, bytes]]:
    """Copied tensors whose names sort otherwise as text, some without bytes, some scalar."""
    tensors = {
        f"model.layers.{layer}.w.weight": faults.plain((50, 20), layer) for layer in range(12)
    }
    tensors["model.layers.2.empty"] = faults.plain((0, 7))
    tensors["model.layers.2.none"] = faults.plain((0,), dtype="F32")
    tensors["model.layers.3.step"] = faults.plain((), dtype="I64")
    tensors["model.layers.3.flag"] = faults.plain(
        (3,), dtype="U8"
    )  # pushes what follows off its elements
    tensors["model.embed_tokens.weight"] = faults.plain((500, 20), 40)
    tensors["lm_head.weight"] = faults.plain((10, 20), 41)
    return tensors


@pytest.mark.parametrize(("size", "jobs"), [(1, 1), (5_000, 1), (5_000, 2), (5_000_000_000, 2)])
def test_files_are_filled_in_model_order(tmp_path: Path, size: int, jobs: int) -> None:
    tensors = _mixed()
    source = faults.write_checkpoint(tmp_path / "source", tensors, quantized=False)
    out = tmp_path / "out"
    plan = Plan.identity(Checkpoint.open(source))
    how = RunOptions(jobs=jobs, memory=512 * MIB, max_shard_size=size)
    receipt = execute(plan, out, how)
    assert _stored(out) == tensors

    _check_receipt(source, out)

    files = sorted(out.glob("*.safetensors"))
    entries = [read_header(file).entries for file in files]
    names = [[entry.name for entry in part] for part in entries]
    assert all(names)
    assert all(
        at % TensorType(kind.dtype, ()).nbytes == 0 for part in entries for _, kind, at in part
    )
    flat = [name for part in names for name in sorted(part, key=natural_key)]
    assert flat == sorted(tensors, key=natural_key)
    for part in names:
        bytes_of_part = sum(tensors[name][0].nbytes for name in part)
        assert bytes_of_part <= size or sum(tensors[name][0].nbytes > 0 for name in part) == 1
    if size == 5_000:  # the embedding alone is larger
        assert ["model.embed_tokens.weight"] in names
    if len(files) == 1:
        assert files[0].name == SINGLE
        assert not (out / INDEX).exists()
    else:
        index = json.loads((out / INDEX).read_bytes())
        assert index["metadata"] == {"total_size": sum(k.nbytes for k, _ in tensors.values())}
        assert index["weight_map"] == {
            name: file.name for file, part in zip(files, names, strict=True) for name in part
        }
        of = len(files)
        said = [f"model-{i + 1:05d}-of-{of:05d}.safetensors" for i in range(of)]
        assert [file.name for file in files] == said
    assert set(receipt.files) == set(tree(out))


def test_safetensors_loads_every_file(sample: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(sample, out, RunOptions(jobs=1, max_shard_size=1_000_000))
    loaded = {}
    for file in out.glob("*.safetensors"):
        loaded.update(load_file(file))
    stored = _stored(out)
    assert set(loaded) == set(stored)
    for name, value in loaded.items():
        kind, data = stored[name]
        assert tuple(value.shape) == kind.shape
        assert value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() == data
        assert value.data_ptr() % value.element_size() == 0


def test_side_files_travel_byte_for_byte(small: Path, converted: Path) -> None:
    for name in ("tokenizer.json", "extra/words/list.txt"):
        assert (converted / name).read_bytes() == (small / name).read_bytes()
    assert not (converted / WORK_DIR).exists()


def test_config_keeps_its_bytes_unless_it_changes(tmp_path: Path) -> None:
    source = faults.write_checkpoint(tmp_path / "source", _mixed(), quantized=False)
    text = '{"model_type":   "toy", "hidden_act": "\\u0073ilu"\n}'
    (source / "config.json").write_text(text, encoding="utf-8")
    execute(Plan.identity(Checkpoint.open(source)), tmp_path / "out", HERE)
    assert (tmp_path / "out" / "config.json").read_text(encoding="utf-8") == text


def test_config_loses_its_quantization(converted: Path) -> None:
    assert json.loads((converted / "config.json").read_bytes()) == faults.config(quantized=False)


# --- the receipt ------------------------------------------------------------------------------


def _check_receipt(source: Path, out: Path) -> None:
    """Every hash of a receipt, against bytes read here."""
    given_to, made = _stored(source), _stored(out)
    lines = _receipt(out)
    tensors = [line for line in lines if "name" in line]
    assert sorted(str(line["name"]) for line in tensors) == sorted(made)
    for line in tensors:
        kind, data = made[str(line["name"])]
        assert line["xxh3"] == xxhash.xxh3_128(data).hexdigest(), line["name"]
        assert (line["dtype"], line["shape"]) == (kind.dtype, list(kind.shape))
        origins = line["sources"]
        assert isinstance(origins, list)
        assert bool(origins) == bool(data)
        for origin in origins:
            read = given_to[origin["name"]][1][origin["start"] : origin["stop"]]
            assert origin["xxh3"] == xxhash.xxh3_128(read).hexdigest(), origin
    files = {str(line["file"]): line for line in lines if "name" not in line}
    assert set(files) == set(tree(out)) - {RECEIPT} - {n for n in tree(out) if n.endswith("/")}
    for name, line in files.items():
        data = (out / name).read_bytes()
        assert line["nbytes"] == len(data)
        if not name.endswith(".safetensors"):
            assert line["xxh3"] == xxhash.xxh3_128(data).hexdigest()
        assert line.get("sha256", hashlib.sha256(data).hexdigest()) == (
            hashlib.sha256(data).hexdigest()
        )


@pytest.mark.parametrize("jobs", [1, 2])
def test_receipt_hashes_are_those_of_the_bytes(sample: Path, tmp_path: Path, jobs: int) -> None:
    out = tmp_path / "out"
    # Little memory: weights are read and written in many parts.
    execute(plan_of(sample), out, RunOptions(jobs=jobs, memory=60 * MIB, max_shard_size=2_000_000))
    _check_receipt(sample, out)
    assert not any("sha256" in line for line in _receipt(out))


def test_sha256_where_asked(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(small, out, replace(faults.options("sharded"), sha256=True))
    _check_receipt(small, out)
    assert all("sha256" in line for line in _receipt(out) if "name" not in line)


def test_the_manifest_names_no_time_and_no_place(small: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "here", tmp_path / "elsewhere" / "there"
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in small.rglob("*"):
        target = moved / file.relative_to(small)
        target.mkdir() if file.is_dir() else target.write_bytes(file.read_bytes())
    convert(small, first, HERE)
    convert(moved, second, HERE)
    assert tree(first) == tree(second)


# --- several nodes in one step ----------------------------------------------------------------


@dataclass(frozen=True)
class Twist:
    """Two results of a tensor: every bit turned, and the same rows as they are."""

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        return (args[0], args[0])

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        yield whole(self, args)

    def scratch(self, *args: TensorType) -> int:
        return args[0].nbytes

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        scratch[:] = bytes(byte ^ 0xFF for byte in ins[0].data)
        outs[0].data[:] = scratch
        outs[1].data[:] = ins[0].data
        return {"twisted rows": ins[0].type.shape[0]}

    def loss(self, *args: TensorType) -> str | None:
        return None


SHAPE = (300, 140)


@pytest.fixture
def one(tmp_path: Path) -> Plan:
    """A checkpoint of one FP8 weight and one vector, planned as it is."""
    tensors = {**faults.weight("a.weight", SHAPE), "b.weight": faults.plain((140,), 5)}
    return Plan.identity(
        Checkpoint.open(faults.write_checkpoint(tmp_path / "source", tensors, quantized=True))
    )


def _with(plan: Plan, tensors: dict[str, Output]) -> Plan:
    return replace(plan, tensors=tensors).check()


def _dequant(plan: Plan) -> Output:
    block = (faults.BLOCK, faults.BLOCK)
    return apply(DequantFp8(block), plan.tensors["a.weight"], plan.tensors["a.weight_scale_inv"])[0]


def _bf16() -> bytes:
    return _decoded(faults.fp8(SHAPE, 0), faults.scales(SHAPE, 1), SHAPE)


def test_chained_nodes_with_shared_results(one: Plan, tmp_path: Path) -> None:
    """One value goes into three outputs, two results of a node into three, in and out of order."""
    value = _dequant(one)
    turned, same = apply(Twist(), value)
    vector = one.tensors["b.weight"].reshape((1, 140))
    tensors = {
        "turned": concat([turned.rows(200, 300), turned.rows(0, 200)]),
        "joined": concat([vector, same, value.rows(10, 20)]),
        "late": concat([value.rows(256, 300), value.rows(0, 256)]),
        "value": value,
    }
    out = tmp_path / "out"
    receipt = execute(_with(one, tensors), out, HERE)
    bf16 = _bf16()
    twisted = bytes(byte ^ 0xFF for byte in bf16)
    row = 2 * SHAPE[1]
    found = {name: data for name, (_, data) in _stored(out).items()}
    assert found == {
        "turned": twisted[200 * row :] + twisted[: 200 * row],
        "joined": faults.plain((140,), 5)[1] + bf16 + bf16[10 * row : 20 * row],
        "late": bf16[256 * row :] + bf16[: 256 * row],
        "value": bf16,
    }
    _check_receipt(one.checkpoint.root, out)
    assert receipt.remarks == ("tensor 'a.weight' with 'a.weight_scale_inv': 300 twisted rows",)


# --- what stops a run -------------------------------------------------------------------------


def _unpublished(out: Path) -> None:
    assert os.listdir(out) == [WORK_DIR]


def test_a_source_that_goes_during_the_run_is_refused(tmp_path: Path) -> None:
    source = faults.write_small(tmp_path / "source")
    last = source / "model-00002-of-00002.safetensors"
    with pytest.raises((RunError, CheckpointError), match=re.escape(f"{last}: cannot be read")):
        execute(
            plan_of(source),
            tmp_path / "out",
            faults.options("single"),
            events=faults.At(last.unlink),
        )
    _unpublished(tmp_path / "out")


def test_a_full_disk_is_seen_before_anything_is_made(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "new" / "out"
    plan = plan_of(small)
    needed = prepare(plan, HERE).layout.nbytes
    asked: list[Path] = []

    def statvfs(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(f_bavail=needed - 1, f_frsize=1)

    monkeypatch.setattr("qconvert.run.folder.workspace.os.statvfs", statvfs)
    with pytest.raises(OutputError, match=rf"free \({needed - 1}\); nothing"):
        execute(plan, out, HERE)
    assert asked == [tmp_path]
    assert os.listdir(tmp_path) == []


def _failing(what: str, at: int) -> Files:
    """Files one call of which fails, as the operating system would."""
    real, calls = getattr(Files, what), count(1)

    def maybe(self: Files, *given: object) -> None:
        if next(calls) == at:
            raise OutputError(f"cannot {what}") from OSError(errno.EIO, "broken")
        real(self, *given)

    failing: Files = type("Failing", (Files,), {what: maybe})()
    return failing


@pytest.mark.parametrize("what", ["create", "write", "sync", "rename"])
@pytest.mark.parametrize("at", [1, 3, 6])
def test_after_an_error_the_same_call_goes_on(
    small: Path, tmp_path: Path, what: str, at: int
) -> None:
    out, whole_out = tmp_path / "out", tmp_path / "whole"
    how = faults.options("sharded")
    convert(small, whole_out, how)
    before = _open_files()
    with pytest.raises(OutputError, match=f"cannot {what}"):
        convert(small, out, how, _failing(what, at))
    assert _open_files() == before
    assert not faults.check_visible(out, tree(whole_out))
    convert(small, out, how)
    assert differing(tree(out), tree(whole_out)) == []


def _open_files() -> list[str]:
    found = [Path("/proc/self/fd") / fd for fd in os.listdir("/proc/self/fd")]
    return sorted(str(link.readlink()) for link in found if link.exists())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("qconvert.run.work.files.reserve", "cannot reserve"),
        ("qconvert.run.work.files.os.pwrite", "cannot write"),
        ("qconvert.run.folder.leases.os.ftruncate", "cannot write"),
    ],
)
def test_no_space_left_comes_with_advice(
    call: str, said: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look at free room is no promise: others write there too."""
    write = os.pwrite

    def full(fd: int, size_or_data: Any, *at: int) -> int:
        if not isinstance(size_or_data, int) and len(size_or_data) < 100:  # of the lock
            return write(fd, size_or_data, *at)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(call, full)
    with pytest.raises(OutputError, match=f"{said}.*: No space left") as caught:
        convert(small, tmp_path / "out", HERE)
    assert "free some space and run the same command again" in str(caught.value)
    _unpublished(tmp_path / "out")


def test_where_blocks_are_memory_none_is_reserved() -> None:
    """Taking them page by page would hold up those who write."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        file = Path(folder, "file")
        Files().create(file, 10 * MIB)
        assert (file.stat().st_size, file.stat().st_blocks) == (10 * MIB, 0)


def test_what_makes_a_checkpoint_is_published_last(small: Path, tmp_path: Path) -> None:
    for kind, commit in (("sharded", INDEX), ("single", SINGLE)):
        moved: list[str] = []

        class ProgressEvents(Files):
            def rename(self, old: Path, new: Path) -> None:
                super().rename(old, new)
                moved.append(new.name)  # noqa: B023 - used up within this turn

        receipt = execute(
            plan_of(small), tmp_path / kind, faults.options(kind), files=ProgressEvents()
        )
        assert moved == [Path(name).name for name in receipt.files]
        assert moved[-1] == commit
        assert moved[-2] == "config.json"
        assert set(receipt.files) == {n for n in tree(tmp_path / kind) if not n.endswith("/")}


def test_output_in_or_around_the_source_is_refused(small: Path) -> None:
    before = tree(small)
    for out in (small, small / "out", small.parent):
        with pytest.raises(OutputError, match="must lie apart from the source"):
            convert(small, out, HERE)
    assert tree(small) == before


# --- data that is wrong -----------------------------------------------------------------------


def _patched(source: Path, name: str, at: int, data: bytes) -> None:
    """Overwrite bytes of a tensor in a one-file checkpoint."""
    file = source / SINGLE
    entry = next(entry for entry in read_header(file).entries if entry.name == name)
    with file.open("r+b") as stream:
        stream.seek(entry.offset + at)
        stream.write(data)


@pytest.mark.parametrize("jobs", [1, 2])
def test_nan_codes_are_told_and_kept(tmp_path: Path, jobs: int) -> None:
    tensors = {**faults.weight("a.weight", SHAPE), **faults.weight("b.weight", SHAPE, 7)}
    source = faults.write_checkpoint(tmp_path / "source", tensors)
    _patched(source, "a.weight", 1000, b"\x7f\xff")
    out = tmp_path / "out"
    receipt = execute(plan_of(source), out, RunOptions(jobs=jobs, memory=512 * MIB))
    assert receipt.remarks == ("tensor 'a.weight' with 'a.weight_scale_inv': 2 NaN codes",)
    values = load_file(out / SINGLE)["a.weight"].view(-1)
    assert values.isnan().nonzero().view(-1).tolist() == [1000, 1001]


@pytest.mark.parametrize(("jobs", "bad"), [(1, float("nan")), (2, float("inf"))])
def test_a_scale_that_is_no_number_stops_the_run(tmp_path: Path, jobs: int, bad: float) -> None:
    tensors = {**faults.weight("a.weight", SHAPE), **faults.weight("b.weight", SHAPE, 7)}
    source = faults.write_checkpoint(tmp_path / "source", tensors)
    out = tmp_path / "out"
    _patched(source, "b.weight_scale_inv", 8, struct.pack("<f", bad))
    how = RunOptions(jobs=jobs, memory=512 * MIB)
    with pytest.raises(RunError, match=r"'b\.weight' with 'b\.weight_sc.*NaN or infinite"):
        execute(plan_of(source), out, how)
    _unpublished(out)
    # Mended, it is another source: the work begun is not gone on with, and a new start succeeds.
    _patched(source, "b.weight_scale_inv", 8, struct.pack("<f", 0.5))
    with pytest.raises(OutputError, match="the source's files"):
        execute(plan_of(source), out, how)
    assert workspace.clean(out, Files())
    execute(plan_of(source), out, how)
    mended = array("f", tensors["b.weight_scale_inv"][1])
    mended[2] = 0.5
    wanted = _decoded(tensors["b.weight"][1], mended.tobytes(), SHAPE)
    assert _stored(out)["b.weight"][1] == wanted


# --- memory -----------------------------------------------------------------------------------


def _smallest(plan: Plan) -> int:
    """The budget that a refusal asks for."""
    with pytest.raises(PlanError) as caught:
        prepare(plan, RunOptions(memory=1, jobs=1))
    found = re.search(r"give --memory (\d+)MiB", str(caught.value))
    assert found is not None
    return int(found.group(1)) * MIB


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.integers(1, 700),
    columns=st.integers(1, 3000),
    experts=st.integers(1, 3),
)
@example(rows=99, columns=1314, experts=2)  # one scale row that several parts read
def test_the_smallest_memory_named_is_enough(
    tmp_path_factory: pytest.TempPathFactory, rows: int, columns: int, experts: int
) -> None:
    folder = tmp_path_factory.mktemp("budget")
    shape = (experts, rows, columns)
    tensors = {**faults.weight("big.weight", shape), **faults.weight("x.weight", (1, 1))}
    plan = plan_of(faults.write_checkpoint(folder / "source", tensors))
    least = _smallest(plan)
    with pytest.raises(PlanError, match=r"tensor 'big\.weight' needs"):
        prepare(plan, RunOptions(memory=least - MIB, jobs=1))
    receipt = execute(plan, folder / "least", RunOptions(memory=least, jobs=1))
    assert receipt.share is not None
    assert receipt.share.total <= least
    execute(plan, folder / "much", RunOptions(memory=2 << 30, jobs=1))
    assert differing(tree(folder / "least"), tree(folder / "much")) == []


@pytest.mark.big
def test_a_share_keeps_to_the_budget(sample: Path) -> None:
    plan = plan_of(sample)
    least = _smallest(plan)
    for memory in range(least, 512 * MIB, 7 * MIB):
        for jobs in (1, 2, 5, 64):
            share = prepare(plan, RunOptions(memory=memory, jobs=jobs)).share
            assert 1 <= share.jobs <= jobs
            assert share.total <= memory
            assert share.total >= len(plan.checkpoint) * PLAN_BYTES_PER_TENSOR
            assert share.arena >= max(unit.peak for unit in prepare(plan, HERE).units)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OutputError])
def test_whatever_ends_a_run_keeps_what_is_done(
    error: type[BaseException], small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, or a disk that fills up: units whose bytes are written are committed before it is told,
    however many a commit should be of."""
    monkeypatch.setattr("qconvert.run.executor.BATCH_BYTES", 1)
    out = tmp_path / "out"
    how = replace(faults.options("single"), commit_bytes=1 << 40)

    class Filling(InTurn):
        left = 4

        def write(self, fd: int, path: Path, data: memoryview, offset: int) -> None:
            self.left -= path.name == SINGLE and offset >= 4096
            if self.left < 0:
                raise error
            super().write(fd, path, data, offset)

    with pytest.raises(error):
        execute(plan_of(small), out, how, files=Filling())
    _unpublished(out)
    assert execute(plan_of(small), out, how).resumed_units > 0
    convert(small, tmp_path / "whole", how)
    assert differing(tree(out), tree(tmp_path / "whole")) == []


def test_no_worker_outlives_an_error_of_the_caller(sample: Path, tmp_path: Path) -> None:
    """Also while the exception, and the frames it holds, are still around."""
    how = RunOptions(jobs=2, memory=512 * MIB)
    broken = faults.At(lambda: (_ for _ in ()).throw(ValueError("the bar broke")))
    before = _children()
    with pytest.raises(ValueError, match="the bar broke") as caught:
        execute(plan_of(sample), tmp_path / "out", how, events=broken)
    assert _children() <= before
    assert caught.tb is not None
    assert not execute(plan_of(sample), tmp_path / "out", how).already_done


def test_workers_that_cannot_start_are_told_of(
    sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sending work to one that is gone is an error of ours, not of whoever reads our output."""
    monkeypatch.setattr("qconvert.run.work.forkserver.sys.executable", shutil.which("false"))
    with pytest.raises(RunError, match=r"worker process \d+ ended with status 1; run the same"):
        execute(plan_of(sample), tmp_path / "out", RunOptions(jobs=2, memory=512 * MIB))
    _unpublished(tmp_path / "out")


def _children() -> set[str]:
    me = os.getpid()
    tasks = [thread.native_id for thread in threading.enumerate()]
    files = [Path(f"/proc/{me}/task/{task}/children") for task in tasks]
    return {pid for file in files for pid in file.read_text().split()}


def test_the_manifest_is_there_and_sound(converted: Path) -> None:
    manifest = json.loads((converted / MANIFEST).read_bytes())
    tensors = faults.small_tensors()
    read = sum(kind.nbytes for kind, _ in tensors.values())
    written = sum(kind.nbytes for kind, _ in _stored(converted).values())
    assert manifest["bytes"] == {"in": read, "out": written, "dropped": 0}
    assert "stat" not in manifest["identity"]
