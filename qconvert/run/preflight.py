"""Checks before a run touches anything: folders, disk, a backend's memory. A foreign folder, or
another plan's work in it: run/workspace.py, run/journal.py. The plan itself: validation/judgement.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qconvert.checkpoint.checkpoint import MANIFEST, WORK_DIR
from qconvert.core.errors import OutputError, PlanError
from qconvert.core.shown import exact_size
from qconvert.models.calibrated import calibrated_in
from qconvert.run.files import existing_parent
from qconvert.run.prepare import disk_bytes
from qconvert.run.target import Parts, Target
from qconvert.run.workspace import check_apart, check_disk, check_folders_apart

if TYPE_CHECKING:
    from qconvert.run.backend import Backend


def check_parts(parts: Parts, backend: Backend | None) -> None:
    """Raise PlanError where calibrated weights have no backend, OutputError for folders in one another
    or in the source, and for disks without space for all that is new."""
    op = next(filter(None, map(calibrated_in, parts[0][0].units)), None)
    if op is not None and backend is None:
        raise PlanError(
            f"{op.what} has to be calibrated, and the run has no backend: give it "
            "qconvert.calibrate.backend.backend_for(plans)"
        )
    if op is not None and parts[0][0].options.shard is not None:
        raise PlanError(
            "--shard divides bytes, and a calibration goes through all layers in order: start the same "
            "command with --distributed on all machines, by torchrun or srun, or run it without --shard"
        )
    needed: dict[int, int] = {}
    for number, (ready, out) in enumerate(parts):
        check_apart(out, ready.plan.checkpoint)
        for _, other in parts[:number]:
            check_folders_apart(out, other)
        if not (out / WORK_DIR).is_dir() and not (out / MANIFEST).is_file():
            device = existing_parent(out).stat().st_dev
            # The work folder of a calibration lies in the first folder.
            extra = backend.needs().disk if backend is not None and number == 0 else 0
            needed[device] = needed.get(device, 0) + disk_bytes(ready) + extra
            check_disk(out, needed[device])


def check_backend(parts: Parts, backend: Backend | None) -> None:
    """Raise PlanError where a backend needs more memory than the run was given, and what the backend's
    own check raises."""
    if backend is None:
        return
    memory, need = parts[0][0].options.memory, backend.needs().memory
    if memory is not None and memory < need:
        raise PlanError(
            f"calibration needs more than {-(-need >> 20)} MiB for what it solves at a time (given: "
            f"{exact_size(memory)}); give more --memory"
        )
    backend.check([out for _, out in parts])


def is_finished(parts: Parts) -> bool:
    """Return whether all folders look finished from outside."""
    return all((out / MANIFEST).is_file() and not (out / WORK_DIR).is_dir() for _, out in parts)


def check_all_finished(targets: Sequence[Target]) -> None:
    """Raise OutputError where the first folder is finished and another is not."""
    for target in targets:
        if not target.space.finished:
            raise OutputError(
                f"{targets[0].out} is finished, and the other folder of its run, {target.out}, is not; "
                f"remove {targets[0].out} to write both again"
            )
