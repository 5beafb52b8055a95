"""Output of a conversion: a folder here, a folder in an object store, or a repo on the Hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.store import is_url, store_of, work_folder
from qconvert.core.errors import UsageError
from qconvert.hub.destination import is_hub
from qconvert.run.folder.prepare import Prepared
from qconvert.run.folder.workspace import check_apart
from qconvert.run.work.options import RunOptions

if TYPE_CHECKING:
    from qconvert.hub.upload_target import HubUploadTarget
    from qconvert.run.engines.store_upload import Delivery

Where = str | Path


@dataclass(frozen=True)
class Output:
    """The folder that a result is made in, None if none was named; with a `url`, where it is sent: to a
    store when it is finished, to a repo on the Hub (`hf://`), which may be `private`, while it is
    made."""

    folder: Path | None
    url: str | None = None
    private: bool = False

    @property
    def name(self) -> str | None:
        return self.url or (None if self.folder is None else str(self.folder))

    @property
    def streamed(self) -> bool:
        return self.url is not None and is_hub(self.url)

    def outlet(self, ready: Prepared) -> HubUploadTarget | None:
        """The repo that a result goes to while it is made, None for any other place."""
        if self.url is None or not self.streamed:
            return None
        from qconvert.hub.destination import outlet_of

        return outlet_of(ready, self.url, private=self.private)

    def delivery(self, ready: Prepared) -> Delivery | None:
        """The folder in a store that a finished result is sent to, None for any other place."""
        if self.url is None or self.streamed:
            return None
        from qconvert.run.engines.store_upload import Delivery

        return Delivery(store_of(self.url), ready)


def output_at(out: Where | None, source: Checkpoint, options: RunOptions) -> Output:
    """Return where a result is made and sent. Raises OutputError for one on top of the source,
    UsageError for what cannot be done in a store."""
    stored = out is not None and is_url(out)
    found = _stored(str(out), source, options) if stored else folder_or_repo(out, options)
    if options.for_run and found.folder is not None:
        check_apart(found.folder, source)
    return found


def outputs_at(outs: Sequence[Where], source: Checkpoint, options: RunOptions) -> list[Output]:
    """The places of results of one run. Raises UsageError where some are repos and others are not, or
    two are one."""
    if any(map(is_hub, outs)) and not all(map(is_hub, outs)):
        raise UsageError(
            f"{outs[0]} and {outs[1]}: one is a folder and one a repo on the Hub; name two of a kind"
        )
    found = [folder_or_repo(out, options) for out in outs]
    urls = [one.url for one in found if one.url is not None]
    if len(set(urls)) < len(urls):
        raise UsageError(f"{urls[0]}: is named for both sides; name another repo for one of them")
    for one in found if options.for_run else ():
        assert one.folder is not None
        check_apart(one.folder, source)
    return found


def folder_or_repo(out: Where | None, options: RunOptions) -> Output:
    """A place that is none in a store. Raises UsageError for a URL, and for --work-dir and --private
    without a repo."""
    if out is not None and is_hub(out):
        from qconvert.hub.destination import check_streamed, hub_destination, hub_work_folder

        repo = hub_destination(str(out))
        check_streamed(repo, options.shard, options.engine)
        return Output(hub_work_folder(repo, options.work_dir), f"hf://{repo}", options.private)
    _check_folder(out, options)
    return Output(None if out is None else Path(out))


def _check_folder(out: Where | None, options: RunOptions) -> None:
    if out is not None and is_url(out):
        raise UsageError(f"{out}: several folders are made at once; name folders of this machine")
    if out is not None and options.work_dir is not None:
        raise UsageError(
            f"--work-dir is for an OUT in a store, and {out} is a folder of this machine"
        )
    _check_private(options)


def _check_private(options: RunOptions) -> None:
    if options.private:
        raise UsageError("--private is of a repo that is made on the Hub: name one, hf://ORG/NAME")


def _stored(out: str, source: Checkpoint, options: RunOptions) -> Output:
    from qconvert.run.engines.store_upload import check_urls_apart

    url = store_of(out).url
    if options.shard is not None and options.work_dir is None:
        raise UsageError(
            f"--shard: name a folder that all machines share by --work-dir, to make {url}"
        )
    _check_private(options)
    check_urls_apart(url, source)
    return Output(work_folder(url, options.work_dir), url)
