"""A model dequantized by the command line, and judged; what is said of a broken one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from checkpoints import Model, Tensor, read_tensors, run_cli
from encoded_models import Array


def bf16(values: Array) -> Tensor:
    """Float32 rounded once."""
    found = torch.from_numpy(np.ascontiguousarray(values, np.float32)).bfloat16()
    return Tensor("BF16", values.shape, found.view(torch.uint8).numpy().tobytes())


def rounded(values: Array) -> bytes:
    """float64 -> bf16, once: the oracle's products have at most 24 bits, so float32 holds them."""
    assert np.array_equal(values, values.astype(np.float32))
    return bf16(values).data


def as_torch(value: Tensor) -> torch.Tensor:
    """A stored tensor as torch has it."""
    kinds = {
        "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "U8": torch.uint8,
        "I8": torch.int8, "I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn,
    }  # fmt: skip
    return torch.frombuffer(bytearray(value.data), dtype=kinds[value.dtype]).reshape(value.shape)


def errors(*arguments: str | Path, level: str = "full") -> list[dict[str, str]]:
    """Errors that `validate` finds, with these arguments."""
    report = json.loads(run_cli("validate", *arguments, "--level", level, "--json").out)
    return [one for one in report["findings"] if one["severity"] == "error"]


def converted(model: Model, folder: Path, *more: str) -> dict[str, Tensor]:
    """Tensors that `dequant` makes, in which `validate --level full` finds no error."""
    source, out = model.write(folder / "source"), folder / "out"
    done = run_cli("dequant", source, out, "--jobs", "1", *more)
    assert done.code == 0, done.err
    assert errors(out, "--against", source) == []
    return read_tensors(out)


def refused(model: Model, folder: Path) -> str:
    """The message of `dequant`, which refuses the model."""
    done = run_cli("dequant", model.write(folder / "source"), folder / "out", "--jobs", "1")
    assert done.code == 1, done.out
    return done.err


def rules(model: Model, folder: Path) -> set[str]:
    """Rules of the errors that `validate` finds in a source."""
    return {one["rule"] for one in errors(model.write(folder / "source"))}
