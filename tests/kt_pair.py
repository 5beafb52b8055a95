"""`qconvert kt` in this process, and the pairs of folders that it makes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Model, Result, published, run_cli, tree

from qconvert.cli.progress import Bar


def kt(
    source: Path,
    cpu: Path,
    gpu: Path | None,
    *more: str,
    method: str = "int4",
    numa: int = 2,
    jobs: int = 1,
) -> Result:
    """The command in this process."""
    words = ["--cpu-out", str(cpu), "--cpu", method, "--numa", str(numa), "--jobs", str(jobs)]
    if gpu is not None:
        words += ["--gpu", "w4a16", "--gpu-out", str(gpu)]
    return run_cli("kt", source, *words, *more)


@dataclass(frozen=True)
class Made:
    """A source and the pair made of it, with what the command said."""

    kind: str
    model: Model
    source: Path
    cpu: Path
    gpu: Path
    said: Result

    def config(self, side: str) -> dict[str, Any]:
        folder = self.cpu if side == "cpu" else self.gpu
        found: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
        return found

    @property
    def experts(self) -> list[str]:
        """Modules of the routed experts."""
        names = (name for name in self.model.tensors if ".mlp.experts." in name)
        return [name.removesuffix(".weight") for name in names if name.endswith(".weight")]


def shards(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def quantization(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_bytes())
    found: dict[str, Any] = config["quantization_config"]
    return found


@dataclass(frozen=True)
class Pair:
    """Two folders, and the command that fills them."""

    source: Path
    cpu: Path
    gpu: Path

    def run(self) -> Result:
        return kt(self.source, self.cpu, self.gpu, "--max-shard-size", "200KB")

    @property
    def trees(self) -> tuple[object, object]:
        return tree(self.cpu), tree(self.gpu)

    def interrupted(self, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ctrl-C at the n-th thing that is told, every unit reported by itself."""
        count = 0

        def wrote(_bar: Bar, _nbytes: int) -> None:
            nonlocal count
            count += 1
            if count == at:
                raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr("qconvert.run.executor.BATCH_BYTES", 1)
            patched.setattr(Bar, "wrote", wrote)
            done = self.run()
        assert done.code == 130, done
        assert "finished work is kept, the same command goes on" in done.err
        assert published(self.cpu) == published(self.gpu) == []
