"""delta and apply: any changed bytes of any dtype, what both refuse, and a killed run."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import ran, read_tensors, run_cli
from hypothesis import given
from hypothesis import strategies as st
from loaders.published import published
from xxhash import xxh3_128_hexdigest

from qconvert import api
from qconvert.checkpoint import delta as form
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import CheckpointError, OutputError, RunError
from qconvert.core.graph import Buffer
from qconvert.ops.constant import Patch
from qconvert.run import delta as writing


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in FP8, and the same after a step of training: some weights moved, a norm doubled, a
    tensor gone, one that is new, another config and another tokenizer, which is no text."""
    root = tmp_path_factory.mktemp("delta")
    published("qwen3_moe", fp8=True, experts=4, inner=128).write(root / "old")
    (root / "old" / "tokenizer.model").write_bytes(b"\x00\xff old")
    (root / "old" / "merges.txt").write_text("a b\n")
    shutil.copytree(root / "old", root / "new")
    (root / "new" / "tokenizer.model").write_bytes(b"\x00\xff new")
    change(root / "new")
    return root / "old", root / "new"


def change(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for number, name in enumerate(sorted(tensors)):
            flat = tensors[name].reshape(-1).view(torch.uint8).clone()
            if number % 4 == 1:
                flat[:: 100 * tensors[name].element_size()] ^= 1
            elif number % 4 == 3:
                flat[flat.numel() // 2] ^= 1
            elif name.endswith("norm.weight"):
                flat ^= 0x11
            tensors[name] = flat.view(tensors[name].dtype).reshape(tensors[name].shape)
        save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 5e6}))


def test_old_and_delta_are_the_new_one(pair: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = pair
    shutil.copytree(new, tmp_path / "new")
    new = tmp_path / "new"
    (new / "chat_template.jinja").write_text("{{ messages }}")  # which the old one has not
    made = run_cli("delta", old, new, tmp_path / "delta", "--json")
    told = json.loads(made.out)
    assert told["bytes"] < 0.06 * told["of_bytes"]
    # It holds weights of the new checkpoint, which safetensors writes for their owner alone.
    assert {file.stat().st_mode & 0o077 for file in (tmp_path / "delta").glob("*.safetensors")} == {
        0
    }
    done = run_cli("apply", old, tmp_path / "delta", tmp_path / "out", "--jobs", "1")
    assert done.code == 0, done.err
    assert read_tensors(tmp_path / "out") == read_tensors(new)
    for name in ("tokenizer.model", "merges.txt", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (new / name).read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_bytes())
    assert config == json.loads((new / "config.json").read_bytes())
    # Neither checkpoint is the one that was read: that is both of them.
    for source in (*pair, new):
        said = run_cli("validate", tmp_path / "out", "--against", source, "--level", "full")
        assert (said.code, said.out) == (1, "")
        assert f"qconvert diff NEW {tmp_path / 'out'} compares it" in said.err
    ran("diff", new, tmp_path / "out")
    checked = run_cli("validate", tmp_path / "out", "--level", "full")  # random codes hold NaN
    assert "proved: every byte has the hash it was written with" in checked.out
    assert "--validate" not in run_cli("apply", "--help-all").out


def test_equal_checkpoints(pair: tuple[Path, Path], tmp_path: Path) -> None:
    made = api.write_delta(pair[0], pair[0], tmp_path / "delta")
    assert (made.changed, made.nbytes, made.delta.files) == (0, 0, ("config.json",))
    api.carry_out(api.plan_patched(pair[0], tmp_path / "delta", tmp_path / "out", jobs=1))
    assert read_tensors(tmp_path / "out") == read_tensors(pair[0])


def test_tensors_of_many_chunks_in_many_files(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large ones are cut: unchanged chunks between changed ones, a last one that is shorter."""
    monkeypatch.setattr(form, "CHUNK", 1000)
    monkeypatch.setattr(writing, "CHUNK", 1000)
    monkeypatch.setattr(writing, "SHARD_BYTES", 1 << 13)
    made = api.write_delta(*pair, tmp_path / "delta")
    assert len(list((tmp_path / "delta").glob("model-*.safetensors"))) > 2
    several = [one for one in made.delta.tensors.values() if len(one.chunks) > 2]
    assert any(one.type.nbytes % 1000 for one in several)
    made_of = [(len(one.chunks), one.type.nbytes // 1000) for one in made.delta.tensors.values()]
    assert any(0 < changed < count for changed, count in made_of)
    planned = api.plan_patched(pair[0], tmp_path / "delta", tmp_path / "out", jobs=1)
    api.carry_out(planned)
    assert read_tensors(tmp_path / "out") == read_tensors(pair[1])


def test_a_delta_is_no_model(pair: tuple[Path, Path], tmp_path: Path) -> None:
    api.write_delta(*pair, tmp_path / "delta")
    from transformers import AutoConfig

    with pytest.raises(ValueError, match="qconvert_delta"):
        AutoConfig.from_pretrained(tmp_path / "delta")


def test_one_percent_of_bf16_is_two_percent_of_the_bytes() -> None:
    count = 3 << 20
    before = np.zeros(count, "<u2")
    now = before.copy()
    now[::100] = 7
    changed, blob = writing._blob(memoryview(before.tobytes()), memoryview(now.tobytes()), 2)
    assert changed == -(-count // 100)
    assert len(blob) < 0.0202 * now.nbytes


@given(
    element=st.sampled_from([1, 2, 4, 8]),
    count=st.integers(1, 300),
    places=st.sets(st.integers(0, 299)),
    block=st.sampled_from([7, 64, 1 << 16]),
)
def test_a_blob_puts_back_what_changed(
    element: int, count: int, places: set[int], block: int
) -> None:
    before = np.random.default_rng(1).integers(0, 256, count * element, np.uint8)
    now = before.copy()
    for place in {place for place in places if place < count}:
        now[place * element] ^= 0xFF
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "BLOCK", block)
        patch.setattr(form, "BLOCK", block)
        changed, blob = writing._blob(memoryview(before.data), memoryview(now.data), element)
    assert changed == len({place for place in places if place < count})
    assert (
        patched(before.tobytes(), blob, now.tobytes(), Patch(element, changed, block, "", ""))
        == now.tobytes()
    )


def patched(before: bytes, blob: bytes, now: bytes, op: Patch) -> bytes:
    op = replace(op, old=xxh3_128_hexdigest(before), new=xxh3_128_hexdigest(now))
    kinds = TensorType("U8", (len(before),)), TensorType("U8", (len(blob),))
    (kind,) = op.infer(*kinds)
    out = bytearray(kind.nbytes)
    ins = [Buffer(each, memoryview(data)) for each, data in zip(kinds, (before, blob), strict=True)]
    op.run(ins, [Buffer(kind, memoryview(out))], memoryview(b""))
    return bytes(out)


def damaged_blob(delta: Path) -> None:
    (file,) = delta.glob("model-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def other_list(delta: Path) -> None:
    found = json.loads((delta / form.DELTA).read_bytes())
    one = next(each for each in found["tensors"].values() if "chunks" in each)
    one["chunks"][0][1] += 1
    (delta / form.DELTA).write_text(json.dumps(found))


def lost_config(delta: Path) -> None:
    (delta / "new" / "config.json").unlink()


@pytest.mark.parametrize(
    ("harm", "error", "says"),
    [
        (damaged_blob, RunError, "its patched bytes are not the new tensor's"),
        (other_list, CheckpointError, r"\[0\]': expected U8 \[\d+\], found U8"),
        (lost_config, CheckpointError, "new/config.json is missing"),
        (lambda delta: (delta / form.DELTA).unlink(), CheckpointError, "found no qconvert-delta.json"),
    ],
)  # fmt: skip
def test_a_broken_delta_is_refused(
    harm: Callable[[Path], None], error: type[Exception], says: str, pair: tuple[Path, Path],
    tmp_path: Path,
) -> None:  # fmt: skip
    api.write_delta(*pair, tmp_path / "delta")
    harm(tmp_path / "delta")
    with pytest.raises(error, match=says):
        api.carry_out(api.plan_patched(pair[0], tmp_path / "delta", tmp_path / "out", jobs=1))
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    ("at", "says"),
    [("lm_head", "not those that the delta was made of"), ("norm", "is not the checkpoint that")],
)
def test_another_old_checkpoint_is_refused(
    at: str, says: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """A tensor that the delta changes, and one that it does not, which shows in the result's hash."""
    old, step, other = (
        resaved(pair[0], tmp_path / str(number), name)
        for number, name in enumerate(("", "lm_head", at))
    )
    api.write_delta(old, step, tmp_path / "delta")
    planned = api.plan_patched(other, tmp_path / "delta", tmp_path / "out", jobs=1)
    with pytest.raises((RunError, OutputError), match=says):
        api.carry_out(planned)
    assert not (tmp_path / "out" / "config.json").exists()


def resaved(source: Path, folder: Path, at: str) -> Path:
    """A copy with the headers of safetensors, in which tensors of that name are others."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if at and at in name and tensors[name].dtype == torch.bfloat16:
                tensors[name] = tensors[name] * (2 if folder.name == "1" else 3)
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def test_headers_of_another_checkpoint_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    api.write_delta(*pair, tmp_path / "delta")
    published("qwen3_moe", experts=2, inner=128).write(tmp_path / "else")
    with pytest.raises(CheckpointError, match="a delta of a checkpoint with other tensors"):
        api.plan_patched(tmp_path / "else", tmp_path / "delta", tmp_path / "out")


def test_only_an_empty_folder_is_written_to(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(OutputError, match="holds 'mine'; name a folder that is empty"):
        api.write_delta(*pair, tmp_path)


def test_a_killed_delta_begins_anew(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "delta"
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from qconvert import api\n"
        "from qconvert.run import delta\n"
        "def killed(file, parts, files, whole=delta.write_whole):\n"
        "    if file.name == sys.argv[4]:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    whole(file, parts, files)\n"
        "delta.write_whole = killed\n"
        "api.write_delta(*sys.argv[1:4])\n"
    )
    for name in ("config.json", form.DELTA):
        done = subprocess.run([sys.executable, "-c", code, *pair, out, name], check=False)
        assert done.returncode == -signal.SIGKILL
        assert not (out / form.DELTA).exists()
    again = api.write_delta(*pair, out)
    assert again.delta == form.read_delta(api.open_checkpoint(out))
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_two_runs_do_not_write_to_one_folder(pair: tuple[Path, Path], tmp_path: Path) -> None:
    from qconvert.run.work.files import Files

    with writing._claimed(tmp_path, Files()), pytest.raises(OutputError, match="another run"):
        api.write_delta(*pair, tmp_path)
