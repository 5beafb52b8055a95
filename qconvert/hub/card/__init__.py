"""The model card of a folder: README.md with front matter for the Hub and three sections for people.

Generated text is placed between HTML comments; text outside them, and existing front matter, is
kept. Keys: the Hub's model cards (huggingface_hub, repocard_data.py). The same
manifest, config and report give the same bytes: no time and no path is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from qconvert.core.errors import CheckpointError
from qconvert.core.yaml_lines import load
from qconvert.hub.card.front import NOT_ASKED, Loads, base_model_of, front_matter
from qconvert.hub.card.sections import (
    evaluation_of,
    made,
    proof,
    quality,
    serve,
    title,
    with_results,
)

if TYPE_CHECKING:
    import yaml

    from qconvert.validation.runner import Report

README = "README.md"
_MARK = "<!-- qconvert:"
# A text that YAML has without quotes, and words of this form that it would not take for text.
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_./-]{0,100}", re.ASCII)
_NO_TEXT = frozenset({"yes", "no", "true", "false", "on", "off", "null"})
_FRONT = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)


def card(
    manifest: Mapping[str, Any] | None,
    config: Mapping[str, Any],
    source: Mapping[str, Any],
    report: Report | None = None,
    existing: str | None = None,
    *,
    base_model: str | None = None,
    forced: bool = False,
    said: Loads = NOT_ASKED,
) -> str:
    """README.md of a folder.

    `manifest` is its qconvert.json (None: another tool made it), `source` the front matter of the
    README of what it was made from, `report` a validation of it, `existing` its README as it is.
    `base_model` is the source's id on the Hub and overrides every other statement of it; `forced` says
    that it is uploaded although the report has errors. Raises CheckpointError where the existing
    front matter cannot be read.
    """
    front, body = split_front_matter(existing or "")
    front = front_matter(manifest, config, source, front, base_model, said)
    if manifest is not None:
        front = with_results(front, manifest, config)
    sections = {"proof": proof(report, manifest, forced=forced)}
    if manifest is not None:
        ours = {
            "made": made(manifest, base_model_of(front)),
            "serve": serve(manifest, config, said),
            **_evaluated(manifest),
        }
        sections = {**ours, **sections}
    if not body.strip():
        body = f"# {title(manifest, config, base_model_of(front))}\n"
    return _dump(front) + "\n" + _placed(body.strip("\r\n"), sections)


def with_evaluation(manifest: Mapping[str, Any], config: Mapping[str, Any], existing: str) -> str:
    """A card with what the manifest's evaluation found, in its front matter and a section of its own;
    the rest as it is. Raises CheckpointError as `card` does."""
    front, body = split_front_matter(existing)
    front = with_results(front, manifest, config)
    before = {name: _held(body, name) for name in ("made", "serve")}
    kept = {name: text for name, text in before.items() if text is not None}
    return _dump(front) + "\n" + _placed(body.strip("\r\n"), {**kept, **_evaluated(manifest)})


def _evaluated(manifest: Mapping[str, Any]) -> dict[str, str]:
    found = evaluation_of(manifest)
    return {} if found is None else {"quality": quality(found)}


def split_front_matter(text: str) -> tuple[dict[str, Any], str]:
    """A README's front matter and the rest of it. Raises CheckpointError for front matter that is not
    a YAML mapping."""
    match = _FRONT.match(text)
    if match is None:
        return {}, text
    try:
        found = load(match[1], "its front matter", loader=_loader(), error=CheckpointError)
    except CheckpointError as error:
        raise CheckpointError(f"{README}: {error}; fix or remove it") from error
    if found is not None and not isinstance(found, dict):
        raise CheckpointError(f"{README}: its front matter is not a mapping; fix or remove it")
    return found or {}, text[match.end() :].lstrip("\r\n")


@cache
def _loader() -> type[yaml.SafeLoader]:
    """PyYAML's, but that only true and false are booleans, as in YAML 1.2: `no` is a language.
    PyYAML quotes such words when it writes, so that both kinds of readers get text."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    boolean = "tag:yaml.org,2002:bool"
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag != boolean]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    words = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
    Loader.add_implicit_resolver(boolean, words, list("tTfF"))
    return Loader


def _dump(front: Mapping[str, Any]) -> str:
    text = plain_yaml(front)
    if text is None:
        import yaml

        text = yaml.safe_dump(dict(front), sort_keys=False, allow_unicode=True, width=1000)
    return f"---\n{text}---\n"


def plain_yaml(front: Mapping[str, Any]) -> str | None:
    """Return what yaml.safe_dump writes of words and lists of words, None where anything else is there:
    a conversion's card has no more, and yaml's import takes 18 ms of CPU."""
    lines = []
    for key, value in front.items():
        items = value if isinstance(value, list) else [value]
        if not items or not all(
            isinstance(word, str) and _WORD.fullmatch(word) for word in (key, *items)
        ):
            return None
        if any(word.lower() in _NO_TEXT for word in (key, *items)):
            return None
        lines += (
            [f"{key}:", *(f"- {word}" for word in items)] if value is items else [f"{key}: {value}"]
        )
    return "".join(f"{line}\n" for line in lines) or None


def _placed(body: str, sections: Mapping[str, str]) -> str:
    """The body with each section in its place: where it was, else after those before it, else after the
    first heading. A mark without its other half is treated as text."""
    for number, (name, text) in enumerate(sections.items()):
        section = f"{_mark(name, 'begin')}\n{text.strip()}\n{_mark(name, 'end')}"
        place = _place(body, name)
        if place is not None:
            body = body[: place[0]] + section + body[place[1] :]
            continue
        earlier = [_place(body, other) for other in list(sections)[:number]]
        at = max((place[1] for place in earlier if place is not None), default=-1)
        if at < 0:
            heading = re.match(r"\s*#[^\n]*\n?", body)
            at = heading.end() if heading else 0
        before, after = body[:at].rstrip("\n"), body[at:].lstrip("\n")
        body = "\n\n".join(part for part in (before, section, after) if part)
    return body.rstrip("\n") + "\n"


def _mark(name: str, which: str) -> str:
    return f"{_MARK}{name} {which} -->"


def _held(body: str, name: str) -> str | None:
    """The text of a section, None where there is none."""
    place = _place(body, name)
    if place is None:
        return None
    whole = body[slice(*place)]
    return whole.removeprefix(_mark(name, "begin")).removesuffix(_mark(name, "end"))


def _place(body: str, name: str) -> tuple[int, int] | None:
    """The range of a section, marks included: an end and the nearest begin before it, without another
    mark between them."""
    begin, end = _mark(name, "begin"), _mark(name, "end")
    stop = body.find(end)
    while stop >= 0:
        start = body.rfind(begin, 0, stop)
        if start >= 0 and _MARK not in body[start + len(begin) : stop]:
            return start, stop + len(end)
        stop = body.find(end, stop + 1)
    return None
