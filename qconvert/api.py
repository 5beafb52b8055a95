"""qconvert for Python programs; the command line is built on it.

A conversion is planned from headers alone, judged by the header rules of `validate`, and carried out
in bounded memory; the folder gets a model card, a receipt and a manifest. After any interruption the
same call continues where it stopped. Errors are the classes below: all derive from QConvertError, and
their texts name the tensor or file, what was expected, what was found and what to do.

    >>> from qconvert import api
    >>> planned = api.plan("dequant-fp8", sample)
    >>> planned.tensors, planned.warnings
    (141, ())
    >>> made = api.run("dequant-fp8", sample, folder / "bf16", jobs=1)
    >>> made.tensors, made.already_done
    (141, False)
    >>> report = api.validate(made.folder, sample, level="full")
    >>> report.errors, report.warnings, report.findings
    (0, 0, [])

Each name is defined, and documented, in the module that the table below names; it is imported when it is
asked for. That loads neither torch nor numpy; they are imported where something is computed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qconvert.advise.advice import Advice
    from qconvert.advise.options import Machine
    from qconvert.checkpoint.checkpoint import Checkpoint
    from qconvert.checkpoint.reading import reading_as
    from qconvert.core.errors import (
        CheckpointError,
        DataError,
        OutputError,
        PlanError,
        QConvertError,
        RecipeError,
        RunError,
        UsageError,
    )
    from qconvert.evaluate.result import Evaluation
    from qconvert.formats.base import Format
    from qconvert.formats.registry import formats
    from qconvert.hub.compare import FileDifference, FilesCompared
    from qconvert.hub.publish import (
        CheckedFolder,
        Uploaded,
        check_upload,
        destination,
        refusal,
        upload,
    )
    from qconvert.passes import passes
    from qconvert.plan.plan import Pass, Plan
    from qconvert.recipe.recipe import Recipe, load_recipe
    from qconvert.repair.repair import Repair
    from qconvert.run.dry_run import DryRun
    from qconvert.run.engines.shard import Share
    from qconvert.run.folder.status import FolderStatus, ShardStatus
    from qconvert.run.in_memory import Converter
    from qconvert.run.profile import Profile, Profiling, profiled
    from qconvert.run.work.events import Events
    from qconvert.run.work.options import PlanOptions
    from qconvert.samples.request import Calibration
    from qconvert.service.checking import advise, evaluate, repair, validate
    from qconvert.service.converting import (
        convert,
        converter,
        plan,
        plan_after,
        plan_graft,
        plan_pair,
        plan_stages,
        run,
    )
    from qconvert.service.planned import Planned, PlannedFolder, PlannedStages, Result
    from qconvert.service.reading import (
        clean,
        diff,
        diff_files,
        headers_of,
        open_checkpoint,
        recipes,
        render,
        status,
    )
    from qconvert.service.running import carry_out, check_dry_run
    from qconvert.validation.diff import Difference
    from qconvert.validation.findings import Finding, Measure, Rule, Verdict
    from qconvert.validation.options import ValidateKeywords
    from qconvert.validation.runner import Report, rules, validate_kernels

__all__ = (
    "Advice", "Calibration", "CheckedFolder", "Checkpoint", "CheckpointError", "Converter",
    "DataError", "Difference", "DryRun", "Evaluation", "Events", "FileDifference", "FilesCompared",
    "Finding", "FolderStatus", "Format", "Machine", "Measure", "OutputError", "Pass", "Plan",
    "PlanError", "PlanOptions", "Planned", "PlannedFolder", "PlannedStages", "Profile", "Profiling",
    "QConvertError", "Recipe", "RecipeError", "Repair", "Report", "Result", "Rule", "RunError",
    "ShardStatus", "Share", "Uploaded", "UsageError", "ValidateKeywords", "Verdict", "advise",
    "carry_out", "check_dry_run", "check_upload", "clean", "convert", "converter", "destination",
    "diff", "diff_files", "evaluate", "formats", "headers_of", "load_recipe", "open_checkpoint",
    "passes", "plan", "plan_after", "plan_graft", "plan_pair", "plan_stages", "profiled", "reading_as",
    "recipes", "refusal", "render", "repair", "rules", "run", "status", "upload", "validate",
    "validate_kernels",
)  # fmt: skip

# The module of each name, imported when the name is asked for: all of them are 390 modules, of which a
# conversion needs 245.
_PLACES = {
    name: module
    for module, names in {
        "advise.advice": "Advice",
        "advise.options": "Machine",
        "checkpoint.checkpoint": "Checkpoint",
        "checkpoint.reading": "reading_as",
        "core.errors": "CheckpointError DataError OutputError PlanError QConvertError RecipeError "
        "RunError UsageError",
        "evaluate.result": "Evaluation",
        "formats.base": "Format",
        "formats.registry": "formats",
        "hub.compare": "FileDifference FilesCompared",
        "hub.publish": "CheckedFolder Uploaded check_upload destination refusal upload",
        "passes": "passes",
        "plan.plan": "Pass Plan",
        "recipe.recipe": "Recipe load_recipe",
        "repair.repair": "Repair",
        "run.dry_run": "DryRun",
        "run.work.events": "Events",
        "run.in_memory": "Converter",
        "run.work.options": "PlanOptions",
        "run.profile": "Profile Profiling profiled",
        "run.engines.shard": "Share",
        "run.folder.status": "FolderStatus ShardStatus",
        "samples.request": "Calibration",
        "service.checking": "advise evaluate repair validate",
        "service.converting": "convert converter plan plan_after plan_graft plan_pair plan_stages run",
        "service.planned": "Planned PlannedFolder PlannedStages Result",
        "service.reading": "clean diff diff_files headers_of open_checkpoint recipes render status",
        "service.running": "carry_out check_dry_run",
        "validation.diff": "Difference",
        "validation.findings": "Finding Measure Rule Verdict",
        "validation.options": "ValidateKeywords",
        "validation.runner": "Report rules validate_kernels",
    }.items()
    for name in names.split()
}


if not TYPE_CHECKING:  # or a type checker would take any name for one of the API's

    def __getattr__(name: str) -> Any:
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(f"qconvert.{_PLACES[name]}"), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
