"""Shell completion, beside the names of commands, options and choices: files, recipes, runtimes,
targets, passes, rules. Each is listed by the module that knows it; none needs numpy or torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

Completed = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def of_words(words: Iterable[tuple[str, str]], incomplete: str) -> list[CompletionItem]:
    """Words, each with a help text, that begin with what was typed."""
    return [CompletionItem(word, help=text) for word, text in words if word.startswith(incomplete)]


def paths(incomplete: str, kind: str = "file") -> list[CompletionItem]:
    """Return what the shell itself completes: `file`, or `dir` for folders alone."""
    return [CompletionItem(incomplete, type=kind)]


def recipes(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Built-in recipes with the first words of their comments."""
    from qconvert.recipe.recipe import builtin_recipes

    found = builtin_recipes().items()
    return of_words(
        ((name, text.partition("\n")[0].lstrip("# ")) for name, text in found), incomplete
    )


def recipes_or_files(
    context: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Built-in recipes; where none begins so, files."""
    return recipes(context, param, incomplete) or paths(incomplete)


def rules(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Rules of `validate` with their titles."""
    from qconvert.validation.runner import rules as known

    return of_words(((rule.id, rule.title) for rule in known().values()), incomplete.upper())


def targets(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The words for what is quantized. Modules by name are those of a model, which is not read here."""
    from qconvert.plan.pass_options import EXPERTS, LINEAR

    words = (
        (EXPERTS, "the routed experts"),
        (LINEAR, "all linear layers that runtimes load so"),
        ("re:", "modules by a regular expression"),
    )
    return of_words(words, incomplete)


def passes(incomplete: str) -> list[CompletionItem]:
    """Passes, and the ends of a recipe."""
    from qconvert.passes import passes as known

    return of_words(((name, "") for name in ("source", *known(), "end")), incomplete)


def consumers(incomplete: str, only: tuple[str, ...]) -> list[CompletionItem]:
    """Runtimes and classes that --for takes, runtimes with the versions that answers are known of."""
    from qconvert.core.versions import RELEASES
    from qconvert.runtimes.consumers import NAMES, RUNTIMES

    words = [(name, "") for name in only or NAMES]
    words += [
        (f"{name}=={version}", "")
        for name in only or NAMES if name in RUNTIMES
        for version in (RELEASES[name].version, *RELEASES[name].earlier)
    ]  # fmt: skip
    return of_words(words, incomplete)
