"""The executor's maker: runs a plan's calibration and hands its codes in, packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qconvert.calibrate.devices import check_devices, found_devices, kind_of
from qconvert.calibrate.settings import LayerStats, Settings, Target
from qconvert.calibrate.stats import begin, check_claim
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import DataError, PlanError
from qconvert.core.graph import Buffer
from qconvert.core.int_scheme import Codes, Packer
from qconvert.matrices.calibrated import calibrated_op
from qconvert.plan.plan import Calibrating, Plan, nodes
from qconvert.run.files import Files
from qconvert.run.outside import Desk, Wanted
from qconvert.run.workspace import check_apart, check_folders_apart
from qconvert.samples.data import load_tokens
from qconvert.samples.request import Calibration, digest_of, fact

if TYPE_CHECKING:
    from qconvert.samples.data import Ids

Key = tuple[int, int, str]


def maker_for(plans: Sequence[Plan], memory: int | None = None) -> CalibrationMaker | None:
    """The maker of plans that are run together, None where nothing is to be calibrated. `memory` in
    bytes, None for half of what is free. Raises PlanError where plans ask for different
    calibrations."""
    asked = [plan.calibration for plan in plans if plan.calibration is not None]
    if not asked:
        return None
    first = asked[0]
    for other in asked[1:]:
        if other.request != first.request:
            raise PlanError(
                "folders made together are calibrated together: give them one calibration"
            )
    # Of all there are: an interrupted run may want no matrix of some kind any more.
    ops = [calibrated_op(node) for plan in plans for node in nodes(plan.tensors.values())]
    packers = {op.kind: op.packers for op in ops if op is not None}
    return CalibrationMaker(first, memory, packers)


@dataclass(frozen=True)
class CalibrationMaker:
    """See `maker_for`."""

    calibration: Calibrating
    memory: int | None
    packers: Mapping[str, tuple[Packer, ...]]

    @cached_property
    def _data(self) -> tuple[list[Ids], list[str]]:
        """The samples, and what a user must know of them: read once, by `check` if it is called."""
        request, remarks = self.calibration.request, list[str]()
        if request.kind in ("text", "jsonl", "dataset"):  # the others need no tokenizer
            _hush_transformers()
        return load_tokens(request, self.calibration.model.checkpoint.root, remarks.append), remarks

    def check(self, folders: Sequence[Path]) -> None:
        request, checkpoint = self.calibration.request, self.calibration.model.checkpoint
        if not self.packers:
            return  # a pipeline stage without routed experts
        if request.save_stats is not None:
            stats = Path(request.save_stats)
            check_apart(stats, checkpoint)
            for folder in folders:
                check_folders_apart(stats, folder)
            check_claim(stats, self._about())
        check_devices(request.devices)
        _ = self._data

    def idle(self) -> Sequence[str]:
        folder = self.calibration.request.save_stats
        if folder is None:
            return []
        return [f"nothing was left to calibrate, so this run wrote no statistics to {folder}"]

    def disk_bytes(self) -> int:
        return room_bytes(self.calibration)

    def make(
        self,
        wanted: Sequence[Wanted],
        desk: Desk,
        *,
        room: Path,
        key: str,
        files: Files,
        say: Callable[[str], None],
    ) -> Sequence[str]:
        _hush()
        from qconvert.calibrate.engine import calibrate
        from qconvert.run.memory import free_bytes

        request, model = self.calibration.request, self.calibration.model
        say("reading calibration data")
        samples, remarks = self._data
        for remark in remarks:
            say(remark)
        self._begin_stats(files)
        handed = _Handed(
            {(w.op.layer, w.op.expert, w.op.kind): w for w in wanted}, desk, request, files
        )
        devices = request.devices or found_devices()
        summary = calibrate(
            model,
            samples,
            _targets(self.packers, model),
            _settings(request),
            handed,
            room=room,
            memory=self.memory or free_bytes() // 2,
            devices=devices,
            key=f"{key} {kind_of(devices)}",
            last=max(w.op.layer for w in wanted),
            say=say,
            files=files,
        )
        handed.check()
        return [*remarks, *summary.remarks, *self._hotness(files)]

    def _begin_stats(self, files: Files) -> None:
        """Claim the folder of statistics before hours of work."""
        request = self.calibration.request
        if request.save_stats is not None:
            begin(Path(request.save_stats), self._about(), files)

    def _about(self) -> dict[str, Any]:
        """What tells these statistics from those of another model, data or format: layers see what
        the formats before them answer."""
        request, checkpoint = self.calibration.request, self.calibration.model.checkpoint
        return {
            "model_type": checkpoint.config.get("model_type"),
            "source": checkpoint.header_digest,
            "source_sample": checkpoint.sample_digest,
            "packers": {kind: repr(packers) for kind, packers in self.packers.items()},
            **fact(request, digest_of(request, checkpoint.root)),
        }

    def _hotness(self, files: Files) -> list[str]:
        """The map of hot experts beside the statistics; a remark says how it is served."""
        from qconvert.calibrate.hotness import OPTIONS, save_hotness

        request, dims = self.calibration.request, self.calibration.model.census.dims
        if request.save_stats is None:
            return []
        try:
            file = save_hotness(
                Path(request.save_stats), dims.num_layers, dims.groups["moe"], files
            )
        except DataError as error:  # an earlier run's layers are in another folder
            return [f"no map of hot experts was written: {error}"]
        return [f"which experts are hot stands beside the statistics: {OPTIONS} {file.name}"]


def room_bytes(calibration: Calibrating) -> int:
    """Bytes that the work folder may come to hold beside the result: states of every token."""
    from qconvert.calibrate.engine import disk_bytes

    request = calibration.request
    hidden = calibration.model.census.dims.hidden_size
    return disk_bytes(request.samples * request.length, hidden)


def _hush() -> None:
    """The libraries' own remarks would stand between the lines of a progress bar."""
    from loguru import logger

    libraries = ("compressed_tensors", "llmcompressor")
    for library in libraries:
        logger.disable(library)
    import llmcompressor  # noqa: F401  (it logs, and sets its logger up, when it is imported)

    for library in libraries:
        logger.disable(library)
    _hush_transformers()


def _hush_transformers() -> None:
    from transformers.utils import logging

    hf: Any = logging
    hf.set_verbosity_error()
    hf.disable_progress_bar()


def _settings(request: Calibration) -> Settings:
    return Settings(
        dampening_frac=request.dampening_frac, block_size=request.block_size,
        experts=request.experts, min_tokens=request.min_tokens, few=request.few,
    )  # fmt: skip


def _targets(packers: Mapping[str, tuple[Packer, ...]], model: Plan) -> list[Target]:
    """What to solve for, in the order of the packers, which all matrices of a kind share."""
    dims = model.census.dims
    columns = {"gate_proj": dims.hidden_size, "down_proj": dims.moe_intermediate_size}
    return [
        Target(gate.scheme_of(columns["gate_proj"]), down.scheme_of(columns["down_proj"]))
        for gate, down in zip(packers["gate_proj"], packers["down_proj"], strict=True)
    ]


class _Handed:
    """Packs what the engine makes and hands in what is still wanted of it."""

    def __init__(
        self, wanted: dict[Key, Wanted], desk: Desk, request: Calibration, files: Files
    ) -> None:
        self._wanted = wanted
        self._desk = desk
        self._request = request
        self._files = files

    def put(
        self,
        layer: int,
        expert: int,
        kind: str,
        made: Sequence[Codes],
        sources: Sequence[Mapping[str, Any]],
    ) -> None:
        wanted = self._wanted.pop((layer, expert, kind), None)
        if wanted is None:  # an interrupted run handed it in already
            return
        buffers: list[Buffer] = []
        for packer, codes in zip(wanted.op.packers, made, strict=True):
            rows, columns = codes.codes.shape
            outs = [
                Buffer(part, memoryview(bytearray(part.nbytes)))
                for part in packer.infer(TensorType("BF16", (rows, columns)))
            ]
            packer.pack(codes, outs)
            buffers += outs
        self._desk.put(wanted.number, buffers, sources)

    def done(self, layer: int, stats: LayerStats) -> None:
        if self._request.save_stats is not None:
            from qconvert.calibrate.stats import save_layer

            save_layer(Path(self._request.save_stats), layer, stats, self._files)
        self._desk.commit()

    def check(self) -> None:
        """Raise PlanError where the engine left something out."""
        if self._wanted:
            layer, expert, kind = min(self._wanted)
            raise PlanError(f"layer {layer}: {kind} of expert {expert} was not calibrated")
