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
    from qconvert.evaluate.ask import Asked
    from qconvert.evaluate.result import Evaluation
    from qconvert.fit.fitting import Budget, Fit, Fitting
    from qconvert.formats.base import Format
    from qconvert.formats.registry import formats
    from qconvert.hub.compare import FileDifference, FilesCompared
    from qconvert.hub.signing import Signed, Verified
    from qconvert.hub.upload import (
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
    from qconvert.run.delta import WrittenDelta
    from qconvert.run.dry_run import DryRun
    from qconvert.run.engines.shard import Share
    from qconvert.run.folder.status import FolderStatus, ShardStatus
    from qconvert.run.in_memory import Converter
    from qconvert.run.profile import Profile, Profiling, profiled
    from qconvert.run.work.events import Events
    from qconvert.run.work.options import PlanOptions
    from qconvert.samples.request import Calibration
    from qconvert.service.checking import (
        advise,
        ask,
        evaluate,
        expert_statistics,
        fitting,
        repair,
        sign,
        validate,
        verify,
    )
    from qconvert.service.converting import (
        convert,
        converter,
        plan,
        plan_after,
        plan_graft,
        plan_pair,
        plan_patched,
        plan_ranks,
        plan_stages,
        quantize,
        run,
        write_delta,
    )
    from qconvert.service.planned import (
        Planned,
        PlannedFolder,
        PlannedStages,
        Result,
        carry_out,
        check_dry_run,
    )
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
    from qconvert.service.weights import OpenedWeights, StoredWeight, open_weights
    from qconvert.validation.diff import Difference
    from qconvert.validation.findings import Finding, Measure, Rule, Verdict
    from qconvert.validation.options import ValidateKeywords
    from qconvert.validation.runner import Report, rules, validate_kernels

__all__ = (
    "Advice", "Asked", "Budget", "Calibration", "CheckedFolder", "Checkpoint", "CheckpointError",
    "Converter", "DataError", "Difference", "DryRun", "Evaluation", "Events", "FileDifference",
    "FilesCompared", "Finding", "Fit", "Fitting", "FolderStatus", "Format", "Machine", "Measure",
    "OpenedWeights", "OutputError", "Pass", "Plan", "PlanError", "PlanOptions", "Planned",
    "PlannedFolder", "PlannedStages", "Profile", "Profiling", "QConvertError", "Recipe",
    "RecipeError", "Repair", "Report", "Result", "Rule", "RunError", "ShardStatus", "Share",
    "Signed", "StoredWeight", "Uploaded", "UsageError", "ValidateKeywords", "Verdict", "Verified",
    "WrittenDelta", "advise", "ask", "carry_out", "check_dry_run", "check_upload", "clean",
    "convert", "converter", "destination", "diff", "diff_files", "evaluate", "expert_statistics",
    "fitting", "formats", "headers_of", "load_recipe", "open_checkpoint", "open_weights", "passes",
    "plan", "plan_after", "plan_graft", "plan_pair", "plan_patched", "plan_ranks", "plan_stages",
    "profiled", "quantize", "reading_as", "recipes", "refusal", "render", "repair", "rules", "run",
    "sign", "status", "upload", "validate", "validate_kernels", "verify", "write_delta",
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
        "evaluate.ask": "Asked",
        "evaluate.result": "Evaluation",
        "fit.fitting": "Budget Fit Fitting",
        "formats.base": "Format",
        "formats.registry": "formats",
        "hub.compare": "FileDifference FilesCompared",
        "hub.signing": "Signed Verified",
        "hub.upload": "CheckedFolder Uploaded check_upload destination refusal upload",
        "passes": "passes",
        "plan.plan": "Pass Plan",
        "recipe.recipe": "Recipe load_recipe",
        "repair.repair": "Repair",
        "run.delta": "WrittenDelta",
        "run.dry_run": "DryRun",
        "run.work.events": "Events",
        "run.in_memory": "Converter",
        "run.work.options": "PlanOptions",
        "run.profile": "Profile Profiling profiled",
        "run.engines.shard": "Share",
        "run.folder.status": "FolderStatus ShardStatus",
        "samples.request": "Calibration",
        "service.checking": "advise ask evaluate expert_statistics fitting repair sign validate "
        "verify",
        "service.converting": "convert converter plan plan_after plan_graft plan_pair plan_patched "
        "plan_ranks plan_stages quantize run write_delta",
        "service.planned": "Planned PlannedFolder PlannedStages Result carry_out check_dry_run",
        "service.reading": "clean diff diff_files headers_of open_checkpoint recipes render status",
        "service.weights": "OpenedWeights StoredWeight open_weights",
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
