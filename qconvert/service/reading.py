"""Checkpoints, results and tables: read, compared or tidied up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.open import open_source
from qconvert.core.errors import OutputError, UsageError
from qconvert.hub.destination import is_hub
from qconvert.run.work.files import Files
from qconvert.run.work.options import RunOptions

if TYPE_CHECKING:
    from qconvert.hub.compare import FilesCompared
    from qconvert.hub.headers import OpenedAt
    from qconvert.run.folder.status import FolderStatus
    from qconvert.validation.diff import Difference
    from qconvert.validation.runner import Report


def open_checkpoint(source: str | Path, *, follow_links: bool = False) -> Checkpoint:
    """A checkpoint known from its headers: a folder, one .safetensors or GGUF file, a repo on the Hub
    (ORG/NAME, hf://ORG/NAME, @REVISION), which is read by ranges where the local cache does not have it,
    a folder in a store by its URL, or the folder of all pipeline stages of a split.

    It maps each tensor's name to its place in a shard; links out of the folder are refused without
    `follow_links`. Raises CheckpointError.

        >>> checkpoint = api.open_checkpoint(sample)
        >>> print(checkpoint["lm_head.weight"].type)
        BF16 [512, 256]
        >>> checkpoint.family.name, len(checkpoint)
        ('qwen3_5', 233)
    """
    return open_source(source, follow_links=follow_links)


@contextmanager
def headers_of(where: str) -> Iterator[OpenedAt]:
    """Within this, `folder` of what it gives can be opened, planned and advised on: headers and small
    files of a repo on the Hub (ORG/NAME, fetched by ranges, no weights) or in a store; of a folder it is
    that one.

        >>> with api.headers_of(str(sample)) as place:
        ...     print(api.open_checkpoint(place.folder).family.name, place.fetched)
        qwen3_5 False

    Raises CheckpointError for a repo that is not there, RunError where the Hub fails for too long."""
    from qconvert.hub.headers import place_of

    with place_of(where) as place:
        yield place


def clean(
    out: str | Path, *, work_dir: str | Path | None = None, dry_run: bool = False
) -> tuple[str, ...]:
    """Drop the unfinished work of an interrupted run in a folder, or in the stages in it; a finished
    result is not touched. Of a repo on the Hub (`hf://ORG/NAME`) the branches with shards of unfinished
    results are removed, and the folder below `work_dir` that they were made in. Returns a line for
    each that was removed, or with `dry_run` would be. Raises OutputError if another run holds it, and
    for no folder; RunError where the Hub fails.

        >>> api.clean(folder / "bf16")  # another example's result, which is finished
        ()
    """
    from qconvert.run.dry_run import unfinished
    from qconvert.run.folder.workspace import clean as _clean

    if is_hub(out):
        return _clean_repo(str(out), work_dir, dry_run=dry_run)
    if work_dir is not None:
        raise UsageError("a work folder is for an OUT on the Hub, hf://ORG/NAME")
    if not Path(out).is_dir():
        raise OutputError(f"{out}: no such folder")
    if dry_run:
        return tuple(f"unfinished work in {found}" for found in unfinished(Path(out)))
    return (f"unfinished work in {out}",) if _clean(Path(out), Files()) else ()


def _clean_repo(where: str, work_dir: str | Path | None, *, dry_run: bool) -> tuple[str, ...]:
    """Remove what runs to a repo left, there and here."""
    from qconvert.hub.upload_target import leftovers_of, remove_branches
    from qconvert.run.folder.workspace import clean as _clean

    found = leftovers_of(where, work_dir)
    if not dry_run:
        if found.folder is not None:  # refused while a run is at work there
            _clean(found.folder, Files())
        remove_branches(found)
    here = () if found.folder is None else (f"unfinished work in {found.folder}",)
    return *here, *(f"branch {name} of {found.repo}" for name in found.branches)


def render(report: Report, form: str) -> str:
    """A validation's report as `text`, `json`, `junit`, `sarif`, `markdown`, `github` or `html`.

        >>> print(api.render(api.validate(sample), "text").splitlines()[-1])
        0 errors, 0 warnings

    Raises UsageError for another form."""
    from qconvert.validation.reports import render as _render

    return _render(report, form)


def recipes() -> dict[str, str]:
    """The built-in recipes, by name, as YAML."""
    from qconvert.recipe.recipe import builtin_recipes

    return builtin_recipes()


def status(out: str | Path) -> tuple[FolderStatus, ...]:
    """Return who did what in a folder that shards fill, or in each stage of a split. Raises OutputError
    where qconvert has made nothing.

        >>> [found.state for found in api.status(api.run("copy", sample, folder / "all").folder)]
        ['finished']
    """
    from qconvert.run.folder.status import status_of

    return status_of(Path(out))


def diff(
    a: str | Path | Checkpoint,
    b: str | Path | Checkpoint,
    *,
    data: bool = True,
    follow_links: bool = False,
) -> list[Difference]:
    """The differences between two checkpoints, tensor by tensor, whatever their shards, and those of
    their config, tokenizer and code; without `data` only names, dtypes and shapes of tensors are
    compared. Raises CheckpointError."""
    from qconvert.validation.diff import compare

    first, second = (checkpoint_of(where, follow_links=follow_links) for where in (a, b))
    return compare(first, second, data=data)


def diff_files(a: str | Path, b: str | Path, *, follow_links: bool = False) -> FilesCompared:
    """Compare a folder with a repo on the Hub (`hf://ORG/NAME`, `@REVISION`), or two repos, file by
    file, by the sizes and hashes that the Hub lists: not a byte of weights is fetched, and hidden
    files are left out. Raises UsageError for two folders, CheckpointError, OutputError, RunError."""
    from qconvert.hub.compare import compare_files

    return compare_files(a, b, follow_links=follow_links)


def opened(source: str | Path | Checkpoint, options: RunOptions) -> Checkpoint:
    return checkpoint_of(source, follow_links=options.follow_links)


def checkpoint_of(source: str | Path | Checkpoint, *, follow_links: bool) -> Checkpoint:
    """A source by its name, or one that is open."""
    if isinstance(source, Checkpoint):
        return source
    return open_source(source, follow_links=follow_links)
