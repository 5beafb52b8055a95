"""Result of an evaluation, written into the folder that it is about: manifest, model card, receipt.

All three are replaced together, as a repair replaces files: an interrupted one is finished by the next,
or leaves no trace. The same conversion, run again, takes the folder for its own result as before.
"""

from __future__ import annotations

from collections.abc import Sequence

from qconvert.checkpoint.checkpoint import MANIFEST, RECEIPT, WORK_DIR, Checkpoint
from qconvert.checkpoint.receipt import sealed_manifest
from qconvert.core.errors import OutputError
from qconvert.core.manifest_keys import EVALUATION
from qconvert.core.shown import count
from qconvert.evaluate.result import Evaluation
from qconvert.hub.card import README, with_evaluation
from qconvert.repair.repair import Change, errors_with
from qconvert.repair.sealed import hash_of, receipt_with
from qconvert.repair.write import finish, write

_WHY = ("records an evaluation",)


def check_recordable(checkpoint: Checkpoint) -> None:
    """Raise OutputError, before hours of work, for a folder that nothing can be written into. What an
    interrupted repair or evaluation replaced in part must have been carried to its end (`finish`)."""
    root = checkpoint.root
    if (root / WORK_DIR).is_dir():
        raise OutputError(
            f"{root}: {WORK_DIR}/ exists: a conversion is unfinished; run its command again, or "
            "qconvert clean"
        )
    if not (root / MANIFEST).is_file():
        raise OutputError(
            f"{root}: has no {MANIFEST}, so qconvert did not make it and nothing can be noted there; "
            "omit --write"
        )
    links = [name for name in (MANIFEST, RECEIPT, README) if (root / name).is_symlink()]
    if links:
        raise OutputError(
            f"{root / links[0]}: is a link (a Hub cache, or a copy by links), and is not written to; "
            "evaluate a folder of its own, or omit --write"
        )
    _check_sound(checkpoint, ())


def record(checkpoint: Checkpoint, found: Evaluation) -> tuple[str, ...]:
    """Note an evaluation of a whole model in its folder's manifest, in place of an earlier one, and on
    its card, if it has one. Returns the names of the files that were written.

    Raises OutputError as `check_recordable` does, CheckpointError for a receipt that does not match its
    seal or a card whose front matter cannot be read.
    """
    assert found.logits is not None, "some layers alone were run"
    finish(checkpoint.root)
    check_recordable(checkpoint)
    before, manifest = checkpoint.manifest_bytes, checkpoint.manifest
    assert manifest is not None
    kept = {key: value for key, value in manifest.items() if key not in ("seal", EVALUATION)}
    noted = {**kept, EVALUATION: found.fact()}
    after = {MANIFEST: (before, sealed_manifest(noted))}
    readme = checkpoint.read(README)
    if readme is not None:
        text = with_evaluation(noted, checkpoint.config, readme.decode("utf-8", "replace"))
        after[README] = (readme, text.encode())
    receipt = checkpoint.read(RECEIPT, checkpoint.receipt_limit)
    if receipt is not None:
        changed = {name: (hash_of(old), new) for name, (old, new) in after.items()}
        after[RECEIPT] = (receipt, receipt_with(receipt, checkpoint, changed))
    changes = [
        Change(name, old, new, _WHY) for name, (old, new) in sorted(after.items()) if old != new
    ]
    if changes:
        _check_sound(checkpoint, changes)
        write(checkpoint.root, changes)
    return tuple(change.file for change in changes)


def _check_sound(checkpoint: Checkpoint, changes: Sequence[Change]) -> None:
    """Raise OutputError where `validate` would find an error in the folder after changes."""
    errors = errors_with(checkpoint.root, changes, follow_links=checkpoint.follow_links)
    if errors:
        first = errors[0]
        more = f" ({count(len(errors) - 1, 'more error')})" if len(errors) > 1 else ""
        raise OutputError(
            f"{checkpoint.root}: fails validation, so nothing is noted there: {first.rule}: "
            f"{first.where}: {first.message}{more}; mend it (qconvert repair), or omit --write"
        )
