"""Listing of a repo that is read: its commit, and a commit's files.

huggingface_hub's own functions follow a page's `Link` with the token to whichever host it names, read
answers of any length, and end in errors of Python where a field is missing. Here a page is the Hub's
own, an answer has a limit, and each of its fields is checked: what is wrong is one CheckpointError.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from qconvert.client.retries import is_at, library, own_headers
from qconvert.core.errors import CheckpointError
from qconvert.core.json_text import parse_json
from qconvert.core.shown import count, shortened

# Seconds without a byte, after which a request is taken for lost.
TIMEOUT = 30.0
MOST_HOPS = 5
# A page of the Hub's has up to 1,000 files, of 200 bytes each.
_MOST_ANSWER = 16 << 20
_MOST_FILES = 40_000
_MOST_PAGES = 400
_CHUNK = 1 << 20
_NEXT = re.compile(r'<([^<>]*)>\s*;\s*rel="?next"?')
# Of git's, or of the bytes.
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_ADVICE = "check HF_ENDPOINT"


@dataclass(frozen=True, slots=True)
class Lfs:
    """Listing of a file that git knows by a pointer."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file as the Hub lists it, with the names that huggingface_hub's RepoFile has."""

    path: str
    size: int
    blob_id: str
    lfs: Lfs | None


def commit_at(endpoint: str, repo: str, revision: str | None) -> str:
    """The commit that a revision stands for, or the default branch. Raises CheckpointError for an answer
    that has none; what a request raises may be repeated."""
    path = f"{endpoint}/api/models/{repo}"
    if revision is not None:
        path += f"/revision/{quote(revision, safe='')}"
    said, _ = _answer(endpoint, path, repo)
    commit = said.get("sha") if isinstance(said, Mapping) else said
    if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise CheckpointError(
            f"{repo}: the Hub says that it is at commit {shortened(repr(commit), 80)}, expected 40 "
            f"digits; {_ADVICE}"
        )
    return commit


def files_of(endpoint: str, repo: str, revision: str) -> list[HubFile]:
    """All files of a revision, folders left out. Raises CheckpointError for a list that the Hub would
    not send; what a request raises may be repeated."""
    where = f"{repo}@{revision}"
    found: dict[str, HubFile] = {}
    for file in _entries(endpoint, repo, revision, where):
        if file is not None and found.setdefault(file.path, file) is not file:
            raise CheckpointError(f"{where}: lists {shortened(file.path, 200)!r} twice; {_ADVICE}")
    return list(found.values())


def _entries(endpoint: str, repo: str, revision: str, where: str) -> Iterator[HubFile | None]:
    url: str | None = f"{endpoint}/api/models/{repo}/tree/{quote(revision, safe='')}?recursive=true"
    seen = 0
    for _ in range(_MOST_PAGES):
        assert url is not None
        page, url = _answer(endpoint, url, repo)
        if not isinstance(page, list):
            raise CheckpointError(
                f"{where}: expected a list of its files, found {type(page).__name__}; {_ADVICE}"
            )
        seen += len(page)
        if seen > _MOST_FILES:
            break
        yield from (_file(entry, where) for entry in page)
        if url is None:
            return
    raise CheckpointError(
        f"{where}: expected at most {count(_MOST_FILES, 'file')}, in {count(_MOST_PAGES, 'page')}, "
        f"found more; name the checkpoint's own repo, or {_ADVICE}"
    )


def _file(entry: Any, where: str) -> HubFile | None:
    """An entry of a list, None for a folder."""
    about = entry if isinstance(entry, Mapping) else {}
    kind, path, blob = about.get("type"), about.get("path"), about.get("oid")
    if kind == "directory" and isinstance(path, str):
        return None
    lfs = about.get("lfs")
    large = lfs if isinstance(lfs, Mapping) else {}
    sizes, hashes = [about.get("size")], [blob]
    if lfs is not None:
        sizes.append(large.get("size"))
        hashes.append(large.get("oid", large.get("sha256")))
    sound = (
        kind == "file"
        and isinstance(path, str)
        and all(type(size) is int and 0 <= size < 1 << 63 for size in sizes)
        and all(isinstance(one, str) and _HASH.fullmatch(one) for one in hashes)
    )
    if not sound:
        raise CheckpointError(
            f"{where}: expected each file to be listed with its path, size and hash, found "
            f"{shortened(repr(entry), 200)}; {_ADVICE}"
        )
    size, *of_lfs = (int(one) for one in sizes if one is not None)
    name, *hash_of_lfs = map(str, hashes)
    kept = Lfs(of_lfs[0], hash_of_lfs[0]) if of_lfs else None
    return HubFile(str(path), size, name, kept)


def _answer(endpoint: str, url: str, repo: str) -> tuple[Any, str | None]:
    """The JSON at an address of the Hub, and the address of the next page, if it names one."""
    for _ in range(MOST_HOPS):
        if not is_at(endpoint, url):
            raise CheckpointError(
                f"{repo}: the Hub sends on to another host, {shortened(url.partition('?')[0], 200)}, "
                f"which is not asked: the token is for {shortened(endpoint, 200)}; {_ADVICE}"
            )
        found = _once(url, repo)
        if not isinstance(found, str):
            return found
        url = found
    raise CheckpointError(
        f"{repo}: expected an answer after at most {MOST_HOPS} redirects, found one more; {_ADVICE}"
    )


def _once(url: str, repo: str) -> tuple[Any, str | None] | str:
    """The answer to one request, or where it redirects to: a repo that was renamed."""
    from huggingface_hub.utils import get_session, hf_raise_for_status  # type: ignore[attr-defined]

    headers = own_headers() | {"Accept-Encoding": "identity"}
    with get_session().stream(
        "GET", url, headers=headers, follow_redirects=False, timeout=TIMEOUT
    ) as answer:
        if answer.has_redirect_location:
            return joined(answer, answer.headers["Location"], repo)
        hf_raise_for_status(answer)
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise CheckpointError(
                f"{repo}: is answered compressed, which was not asked for; {_ADVICE}"
            )
        data = bytearray()
        for chunk in answer.iter_raw(_CHUNK):
            data += chunk
            if len(data) > _MOST_ANSWER:
                raise CheckpointError(
                    f"{repo}: expected an answer of at most {_MOST_ANSWER} bytes from "
                    f"{answer.url.path}, found more; {_ADVICE}"
                )
        following = _NEXT.search(answer.headers.get("Link", ""))
        more = None if following is None else joined(answer, following[1], repo)
        return parse_json(bytes(data), f"the Hub's answer about {repo} ({_ADVICE})"), more


def joined(answer: Any, target: str, repo: str) -> str:
    """The address that an answer names, which may be relative to its own. Raises CheckpointError for
    what is none."""
    try:
        return str(answer.url.join(target))
    except (library().InvalidURL, ValueError) as error:
        raise CheckpointError(
            f"{repo}: the Hub names {shortened(repr(target), 200)} as an address, which is none: "
            f"{error}; {_ADVICE}"
        ) from error
