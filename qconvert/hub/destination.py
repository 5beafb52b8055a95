"""A repo on the Hub as the output of a conversion: its name, and the folder that its shards are made
in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from qconvert import __version__
from qconvert.checkpoint.hub_cache import Repo, parse_repo
from qconvert.checkpoint.store import stores_root
from qconvert.core.errors import UsageError

if TYPE_CHECKING:
    from qconvert.hub.upload_target import HubUploadTarget
    from qconvert.plan.plan import Plan
    from qconvert.run.folder.prepare import Prepared
    from qconvert.run.work.options import EngineName

_SCHEME = "hf://"
_BRANCH = re.compile(r"[^\s~^:?*\[\\\x00-\x1f\x7f]{1,200}")


def is_hub(where: str | Path) -> bool:
    """Return whether a text names a repo on the Hub as a place to write to: without `hf://` it is a
    folder."""
    return isinstance(where, str) and where.startswith(_SCHEME)


def hub_destination(where: str) -> Repo:
    """The repo, and the branch after `@`. Raises UsageError for what is neither."""
    found = parse_repo(where)
    assert found is not None, "it begins with hf://"
    branch = found.revision
    if branch is not None and (
        not _BRANCH.fullmatch(branch)
        or ".." in branch
        or branch.startswith(("/", "-"))
        or branch.endswith(("/", ".", ".lock"))
    ):
        raise UsageError(f"{where}: {branch!r} is not a valid branch name")
    return found


def check_streamed(repo: Repo, shard: object | None, engine: EngineName) -> None:
    """Raise UsageError for runs that several machines do together: shards are sent by one."""
    if shard is not None or engine != "local":
        what = "--shard" if shard is not None else f"--engine {engine}"
        raise UsageError(
            f"{what} is not for an OUT on the Hub, {_SCHEME}{repo}, whose shards one machine makes and "
            "sends: name a folder, then `qconvert upload` it"
        )


def hub_work_folder(repo: Repo, below: str | Path | None) -> Path:
    """Return where shards are made that go to a repo."""
    root = stores_root().with_name("outputs") if below is None else Path(below)
    branch = "" if repo.revision is None else f"@{quote(repo.revision, safe='')}"
    return root / "hf" / f"{repo.id}{branch}"


def outlet_of(ready: Prepared, url: str, *, private: bool = False) -> HubUploadTarget:
    """The repo as what a prepared plan is sent to."""
    from qconvert.client.retries import to_stderr
    from qconvert.hub.upload_target import HubUploadTarget
    from qconvert.run.folder.staging import identity_of, publish_order
    from qconvert.run.folder.workspace import lasting

    steps = ", ".join(entry.name for entry in ready.plan.log)
    return HubUploadTarget(
        hub_destination(url),
        publish_order(ready),
        {file.name: file.size for file in ready.layout.files},
        lasting(identity_of(ready)),
        len(ready.plan.tensors),
        f"qconvert {__version__}: {steps or 'copy'}",
        private=private,
        say=to_stderr,
    )


def naming_other(side: Plan, url: str) -> Plan:
    """A side of a pair whose manifest, and so its card, names the repo of the other side."""
    fact = {**side.facts["pair"], "repo": hub_destination(url).id}
    return replace(side, facts={**side.facts, "pair": fact})


def naming_stages(stage: Plan, repos: Sequence[str]) -> Plan:
    """A stage of a split whose manifest, and so its card, names the repos of all stages."""
    fact = {**stage.facts["stage"], "repos": list(repos)}
    return replace(stage, facts={**stage.facts, "stage": fact})


def stage_repo(repo: Repo, folder: str) -> Repo:
    """The repo of one stage of a split."""
    return Repo(f"{repo.id}-{folder}", repo.revision)
