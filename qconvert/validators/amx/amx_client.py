"""Experts for KTransformers' CPU kernels: its own client must load them and compute the right result.

The first and the last layer that kt-kernel serves are checked, with a few tokens that reach up to 64
experts. Two references: from the weights as this folder's codes and scales give them, and from the
source's. In float32, except for what the client rounds by design: a token's activations to int8 before
each matrix, and results to bf16. Without that, its result would be 0.02 to 0.03 of its norm from the
first for any weights at all; with it, 0.002 to 0.005. From the second it is 0.02 to 0.05 for int8 and
0.2 to 0.6 for int4, depending on the weights' tails, so that bound follows from the folder's own steps.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING

from qconvert.core import own_process
from qconvert.core.errors import PlanError
from qconvert.core.extras import lacking
from qconvert.run.work.reader import Reader
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, NotChecked, validator
from qconvert.validators.amx.amx_weights import tiles_before
from qconvert.validators.amx.kt_forward import UNABLE, Job
from qconvert.validators.amx.reading import Block, Sources, matching_source, read_block, weights
from qconvert.validators.reading.experts import KINDS
from qconvert.validators.reading.rows import bf16_rows

if TYPE_CHECKING:
    import numpy as np
    import torch

    from qconvert.validators.reading.decode import Floats

MOST = 0.01
# Other weights give other activations, which round differently: so far from the source in any case, and
# further by this share of the average error of rounding to the folder's steps.
_BY_ACTIVATIONS, _MARGIN = 0.03, 1.5
# Calibrated codes are further off for tokens like these, which were not in the calibration: weights by
# up to 4 times even rounding (heavy-tailed int4, measured). Unrelated weights are off by 1.4.
_CALIBRATED_MARGIN, _UNRELATED = 6.0, 0.9
_TOKENS, _CHOICES = 8, 8
# A layer of the largest models is some 20 GB to read.
_PATIENCE_S = 1800.0
# torch and kt-kernel in a process of their own, numpy and torch in this one: measured, 460 MiB.
_BESIDE = 512 << 20
_TAIL = 200  # last characters of a dead process's output


class ClientError(Exception):
    """kt-kernel did not compute; the text says how it ended."""


@validator(
    "kt-kernel loads the experts and computes what they mean (a sample: the first and the last "
    "layer)",
    "amx",
    "full",
    "kt-kernel",
    "source",
)
def amx_client(folder: Folder) -> Iterator[Finding]:
    """Two layers through kt-kernel in a process of their own, and again in torch."""
    if missing := lacking("kernels", "torch"):
        raise NotChecked(f"kt-kernel computes with torch: {missing}")
    block, sources, layers = _prepare(folder)
    _check_memory(folder, block)
    for layer in layers:
        where = f"blk.{layer}"
        try:
            errors = compare_layer(folder, block, sources, layer)
        except ClientError as error:
            yield Finding("QC045", "error", where, f"layer {layer}: {error}")
        except PlanError as error:
            what = f"layer {layer}: kt-kernel loads it, but it does not match the manifest"
            yield Finding("QC045", "error", where, f"{what}: {error}")
        else:
            if not errors.fit:
                yield Finding("QC045", "error", where, f"layer {layer}: {errors}")


@dataclass(frozen=True, slots=True)
class Errors:
    """Distance of the client's result from the references, norm of the difference over norm; and how
    far rounding to the folder's steps moves a result on average."""

    ours: float
    source: float
    rounding: float
    calibrated: bool = False

    @property
    def fit(self) -> bool:
        return self.ours <= MOST and self.source <= self._allowed

    @property
    def _allowed(self) -> float:
        if self.calibrated:
            return min(_UNRELATED, _BY_ACTIVATIONS + _CALIBRATED_MARGIN * self.rounding)
        return _BY_ACTIVATIONS + _MARGIN * self.rounding

    def __str__(self) -> str:
        return (
            f"kt-kernel's result is off by {self.ours:.3g} of its norm from what this folder's weights "
            f"give (expected at most {MOST}), and by {self.source:.3g} from what the source's give "
            f"(expected at most {self._allowed:.3g})"
        )


def _prepare(folder: Folder) -> tuple[Block, Sources | Block, list[int]]:
    """The block, the source's matrices, or its tiles, and the layers to check. Tensors that are not the
    manifest's (QC040) do not prevent the client's run: what it does with them is what a user sees."""
    assert folder.source is not None
    try:
        block = read_block(folder.checkpoint)
    except PlanError as error:
        raise NotChecked(f"QC040: {error}") from error
    sources = tiles_before(block, folder) or matching_source(block, folder)
    served = [n for n in block.layers if n < folder.source.role_index.dims.num_layers]
    if not served:
        raise NotChecked("it holds draft layers only, which kt-kernel does not serve")
    return block, sources, sorted({served[0], served[-1]})


def _check_memory(folder: Folder, block: Block) -> None:
    """Raises NotChecked if a layer takes more memory than granted. kt-kernel reads its files while it
    holds the converted weights."""
    memory = folder.request.memory
    layer = sum(kind.nbytes for _, kind in block.tensors()) // len(block.layers)
    need = _BESIDE + layer * 3 // 2
    if memory is not None and need > memory:
        raise NotChecked(
            f"a layer in kt-kernel takes {need >> 20} MiB, torch included, more than the memory "
            f"granted; give --memory {-(-need >> 20)}MiB"
        )


def compare_layer(folder: Folder, block: Block, sources: Sources | Block, layer: int) -> Errors:
    """Both errors of a layer. Raises ClientError if the client does not compute, NotChecked if
    it cannot on this machine, PlanError if there is nothing to compare with."""
    import numpy as np

    assert folder.source is not None
    inputs = _inputs(block, layer)
    result = _client(folder, block, layer, inputs)
    ours, theirs = Reader(folder.checkpoint.shards), Reader(folder.source.shards)
    noise, size = np.zeros(len(KINDS)), np.zeros(len(KINDS))
    try:
        by_ours, by_source = (np.zeros_like(result) for _ in range(2))
        for expert in np.unique(inputs.ids).tolist():  # one expert's matrices at a time
            mine = [weights(block, folder.checkpoint, ours, layer, k, expert) for k in KINDS]
            inputs.add(by_ours, expert, [values for values, _ in mine], block.numa)
            noise += [each for _, each in mine]
            del mine
            real = [
                weights(sources, folder.source, theirs, layer, kind, expert)[0]
                if isinstance(sources, Block)
                else bf16_rows(theirs, sources[layer, kind, expert])
                for kind in KINDS
            ]
            inputs.add(by_source, expert, real, block.numa)
            size += [float(np.linalg.norm(matrix)) ** 2 for matrix in real]
    finally:
        ours.close()
        theirs.close()
    with np.errstate(all="ignore"):
        rounding = float(np.sqrt(np.sum(noise / size)))
    calibrated = block.rounding == "gptq"
    return Errors(_distance(result, by_ours), _distance(result, by_source), rounding, calibrated)


@dataclass(frozen=True)
class _Inputs:
    """Hidden states [T, H] as bf16 bits, and for each token k experts and their weights."""

    hidden: np.ndarray[tuple[int, ...], np.dtype[np.uint16]]
    ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    shares: Floats

    def add(self, result: Floats, expert: int, matrices: list[Floats], numa: int) -> None:
        """Add what an expert of these matrices (gate, up, down) contributes."""
        import numpy as np
        import torch

        tokens, choices = np.nonzero(self.ids == expert)
        wide = (self.hidden[tokens].astype(np.uint32) << 16).view(np.float32)
        x, gate, up, down = (torch.from_numpy(part) for part in (wide, *matrices))
        x = _to_int8(x)
        g, u = _to_bf16(x @ gate.T), _to_bf16(x @ up.T)
        inner = _to_bf16(torch.nn.functional.silu(g) * u)
        made = torch.zeros(len(tokens), down.shape[0])
        # Each NUMA node has columns of down, and rounds its own part of the activations.
        for part, columns in zip(inner.chunk(numa, 1), down.chunk(numa, 1), strict=True):
            made += _to_bf16(_to_int8(part) @ columns.T)
        result[tokens] += self.shares[tokens, choices][:, None] * made.numpy()


def _to_bf16(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().float()


def _to_int8(values: torch.Tensor) -> torch.Tensor:
    """Each row to 127 steps on either side of 0."""
    step = (values.abs().amax(1, keepdim=True) / 127).clamp_min(2.0**-126)
    return (values / step).round() * step


def _inputs(block: Block, layer: int) -> _Inputs:
    """Tokens that are equal in every run, and experts spread over all there are."""
    import numpy as np

    random = np.random.default_rng(layer)
    hidden = random.standard_normal((_TOKENS, block.hidden), np.float32).view(np.uint32) >> 16
    count = min(_CHOICES, block.experts)
    first = np.arange(count) * block.experts // count
    shift = np.arange(_TOKENS) * block.experts // (_TOKENS * count)
    ids = (first[None, :] + shift[:, None]) % block.experts
    shares = np.exp(random.standard_normal((_TOKENS, count), np.float32))
    shares /= shares.sum(axis=1, keepdims=True)
    return _Inputs(hidden.astype(np.uint16), ids.astype(np.int64), shares)


def _client(folder: Folder, block: Block, layer: int, inputs: _Inputs) -> Floats:
    """The product that kt-kernel computes. Raises ClientError or NotChecked."""
    import numpy as np

    if any(shard.remote is not None for shard in folder.checkpoint.shards):
        raise NotChecked("kt-kernel reads files: copy the folder from its store")
    with tempfile.TemporaryDirectory(prefix="qconvert-kt-") as where:
        work_dir = Path(where)
        np.savez(
            work_dir / "inputs.npz", allow_pickle=False, hidden=inputs.hidden, ids=inputs.ids,
            shares=inputs.shares,
        )  # fmt: skip
        job = Job(
            weights=str(folder.checkpoint.root.resolve()),
            layer=layer,
            experts=block.experts,
            hidden=block.hidden,
            intermediate=block.intermediate,
            numa=block.numa,
            method=block.runtime_name,
            threads=max(block.numa, len(os.sched_getaffinity(0))),
            inputs=str(work_dir / "inputs.npz"),
            output=str(work_dir / "output.npy"),
            reason=str(work_dir / "reason"),
        )
        job.write(work_dir / "job.json")
        words = ["-m", "qconvert.validators.amx.kt_forward", str(work_dir / "job.json")]
        try:
            done = subprocess.run(
                **own_process.python(*words), stdin=subprocess.DEVNULL,
                capture_output=True, timeout=_PATIENCE_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise ClientError(f"kt-kernel had not answered after {_PATIENCE_S:.0f} s") from error
        if done.returncode == UNABLE and Path(job.reason).is_file():
            reason = Path(job.reason).read_text(encoding="utf-8")
            raise NotChecked(f"kt-kernel cannot run here: {reason}")
        if done.returncode:
            said = " ".join(done.stderr.decode(errors="replace").split())[-_TAIL:]
            raise ClientError(
                f"kt-kernel was expected to load it for {block.numa} NUMA nodes, found its process "
                f"dead with {_exit(done.returncode)}" + (f"; it said last: {said}" if said else "")
            )
        result: Floats = np.load(job.output)
        return result


def _exit(code: int) -> str:
    return f"exit code {code}" + (f" ({Signals(-code).name})" if code < 0 else "")


def _distance(found: Floats, expected: Floats) -> float:
    """NaN if anything is not finite, which no bound accepts."""
    import numpy as np

    with np.errstate(all="ignore"):
        off = float(np.linalg.norm((found - expected).astype(np.float64)))
        size = float(np.linalg.norm(expected.astype(np.float64)))
    return 0.0 if off == 0 else off / size if size else float("inf")
