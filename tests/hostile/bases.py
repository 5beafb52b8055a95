"""Sound checkpoints, results and left-overs of killed runs: what mutations break.

Made once in a folder that several processes may share, one base at a time, on first use.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import faults
import gdn_models
from adapters import lora
from checkpoints import Model, Tensor, run_cli, write_shard
from draft_tables import Config, Tensors, dflash, eagle3
from loaders.published import published
from models import nvfp4_moe, qwen3_moe
from rank_files import RankFiles

from qconvert.run.work.files import Files

_README = b"---\nlicense: apache-2.0\nbase_model: someone/somewhat\n---\n# The model's own page\n"


@dataclass(frozen=True)
class Bases:
    """The bases below a folder, made when they are asked for."""

    root: Path

    def folder(self, name: str) -> Path:
        """A base (a file, for some) to be copied."""
        made = self.root / name
        if made.exists():
            return made
        self.root.mkdir(parents=True, exist_ok=True)
        make = _MAKE[name]
        for needed in _NEEDS.get(name, ()):
            self.folder(needed)
        with (self.root / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                unfinished = self.root / f".{name}.making"
                shutil.rmtree(unfinished, ignore_errors=True)
                make(self, unfinished)
                unfinished.rename(made)
        return made


Make = Callable[[Bases, Path], object]


def _written(model: Callable[[], Model], shards: int = 2) -> Make:
    def make(_bases: Bases, folder: Path) -> None:
        made = model()
        made.side_files.setdefault("tokenizer.json", b'{"version": "1.0"}\n')
        made.side_files["README.md"] = _README
        rows = [t.shape[0] for n, t in made.tensors.items() if n.endswith("embed_tokens.weight")]
        made.config.setdefault("vocab_size", rows[0] if rows else 8)
        made.write(folder, shards)

    return make


def _converted(source: str, *words: str) -> Make:
    """By the command line; `{src}` and `{out}` in the words."""

    def make(bases: Bases, folder: Path) -> None:
        places = {"{src}": str(bases.folder(source)), "{out}": str(folder)}
        done = run_cli(*(places.get(word, word) for word in words), "--jobs", "1")
        if done.code != 0:
            raise RuntimeError(f"base {folder.name}: {done.err}")

    return make


def _killed(what: str, after: int) -> Make:
    """What `qconvert dequant` of the base fp8, in several files, leaves when it is killed after so many
    operations of a kind: the same command goes on from there."""

    def make(bases: Bases, folder: Path) -> None:
        words = (
            "dequant",
            bases.folder("fp8"),
            folder,
            "--max-shard-size",
            "100000",
            "--jobs",
            "1",
        )

        def run() -> None:
            real = getattr(Files, what)
            left = [after]

            def dying(self: Files, *arguments: Any) -> Any:
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                return real(self, *arguments)

            setattr(Files, what, dying)
            run_cli(*words)

        code = faults.in_child(run)
        if code != -9:
            raise RuntimeError(f"base {folder.name}: was to be killed, and ended with {code}")

    return make


def _calibratable(_bases: Bases, folder: Path) -> None:
    """What transformers can compute with, as it saves it. In a process of its own: torch is large."""

    def make() -> None:
        import calibrate_models

        calibrate_models.saved(calibrate_models.qwen3_moe(num_hidden_layers=1), folder)

    if faults.in_child(make) != 0:
        raise RuntimeError("base calibratable: transformers could not make it")


def _stats(_bases: Bases, folder: Path) -> None:
    """What `--save-stats` leaves, of the base bf16."""
    import numpy as np

    layers, experts, hidden, intermediate = 2, 2, 128, 128
    folder.mkdir()
    (folder / "stats.json").write_text('{"samples": 2}\n', encoding="utf-8")
    for layer in range(layers):
        at = f"layers.{layer}"
        parts: dict[str, tuple[str, Any]] = {
            "counts": ("I64", np.full(experts, 500, "<i8")),
            "saliency": ("F32", np.full(experts, 0.5, "<f4")),
            "gate_up.mean_square": ("F32", np.full((experts, hidden), 0.5, "<f4")),
            "gate_up.absmax": ("F32", np.full((experts, hidden), 2, "<f4")),
            "down.mean_square": ("F32", np.full((experts, intermediate), 0.5, "<f4")),
            "down.absmax": ("F32", np.full((experts, intermediate), 2, "<f4")),
        }
        tensors = {f"{at}.{k}": Tensor(d, a.shape, a.tobytes()) for k, (d, a) in parts.items()}
        notes = {"few": "[]", "rounded": "[]", "dead_columns": "{}", "fallbacks": "[]"}
        write_shard(folder / f"layer-{layer:05d}.safetensors", tensors, notes)


def _keys(_bases: Bases, folder: Path) -> None:
    """A private key and its public one, in PEM."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    folder.mkdir()
    made = ec.generate_private_key(ec.SECP256R1())
    private = made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = made.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (folder / "key.pem").write_bytes(private)
    (folder / "key.pub").write_bytes(public)


def _signed(bases: Bases, folder: Path) -> None:
    """A conversion with its signature, and the public key in it."""
    shutil.copytree(bases.folder("made"), folder)
    shutil.copy(bases.folder("keys") / "key.pub", folder / "key.pub")
    done = run_cli("sign", folder, "--key", bases.folder("keys") / "key.pem")
    if done.code != 0:
        raise RuntimeError(f"base {folder.name}: {done.err}")


def _delta(bases: Bases, folder: Path) -> None:
    """A delta of the base bf16, in which the last bytes of its shards are others."""
    new = folder.with_name("delta-new")
    shutil.copytree(bases.folder("bf16"), new)
    for file in new.glob("*.safetensors"):
        data = file.read_bytes()
        file.write_bytes(data[:-2] + bytes([data[-2] ^ 1, data[-1]]))
    assert run_cli("delta", bases.folder("bf16"), new, folder).code == 0
    shutil.rmtree(new)


def _draft(make: Callable[[str], tuple[Tensors, Config]], form: str) -> Make:
    tensors, config = make(form)
    return _written(lambda: Model(config, dict(tensors)), 1)


def _text(text: str) -> Make:
    return lambda _bases, file: file.write_text(text, encoding="utf-8")


def _fp8_small() -> Model:
    return qwen3_moe("fp8", intermediate=128)


def _bf16_small() -> Model:
    return qwen3_moe("bf16", intermediate=128)


_MAKE: Mapping[str, Make] = {
    "fp8": _written(_fp8_small),
    "bf16": _written(_bf16_small),
    "single": _written(_bf16_small, 1),
    "gdn": _written(partial(gdn_models.model, "qwen3_5_moe")),
    "stacked": _written(partial(gdn_models.model, "qwen3_5_moe", stacked=True)),
    "nvfp4": _written(nvfp4_moe),
    "fused": _converted("gdn", "fuse", "{src}", "{out}", "--for", "sglang"),
    "bare": _converted("gdn", "mtp", "drop", "{src}", "{out}"),
    "adapter": lambda bases, folder: lora(bases.folder("bf16"), folder),
    "delta": _delta,
    "draft": _draft(eagle3, "sglang"),
    "flash": _draft(dflash, "sglang"),
    "speculator": _draft(eagle3, "speculators"),
    "served": _written(partial(published, "qwen3_moe")),
    "ranks": lambda _, folder: RankFiles(2).write(folder),
    "prepared": _converted("nvfp4", "prepare", "trtllm-gen", "{src}", "{out}"),
    "made": _converted("fp8", "dequant", "{src}", "{out}"),
    "sharded": _converted("fp8", "dequant", "{src}", "{out}", "--max-shard-size", "100000"),
    "amx": _converted("bf16", "amx", "{src}", "{out}", "--method", "int8", "--numa", "1"),
    "w4a16": _converted("bf16", "w4a16", "{src}", "{out}", "--rtn", "--group-size", "32"),
    "stages": _converted("fp8", "split", "{src}", "{out}", "--pp", "1,1", "--for", "vllm"),
    "shared": _converted(
        "fp8", "dequant", "{src}", "{out}", "--max-shard-size", "100000", "--shard", "0/2"
    ),
    "unfinished": _killed("append", 2),
    "publishing": _killed("rename", 3),
    "calibratable": _calibratable,
    "evaluable": _converted(
        "calibratable", "w4a16", "{src}", "{out}", "--rtn", "--group-size", "32"
    ),
    "stats": _stats,
    "keys": _keys,
    "signed": _signed,
    "recipe.yaml": _text("passes:\n  - dequant\n"),
    "data.jsonl": _text('{"input_ids": [1, 2, 3]}\n{"input_ids": [3, 4]}\n'),
}
_NEEDS = {
    "fused": ("gdn",), "bare": ("gdn",), "adapter": ("bf16",), "delta": ("bf16",),
    "prepared": ("nvfp4",), "made": ("fp8",), "sharded": ("fp8",), "amx": ("bf16",),
    "w4a16": ("bf16",), "stages": ("fp8",), "shared": ("fp8",), "unfinished": ("fp8",),
    "publishing": ("fp8",), "signed": ("made", "keys"), "evaluable": ("calibratable",),
}  # fmt: skip
