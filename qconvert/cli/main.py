"""The command `qconvert`: its exit codes, and errors as one sentence. The commands are in the files
beside this one; none imports numpy or torch before something is computed."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import nullcontext
from importlib import import_module
from types import FrameType
from typing import Any

import click

from qconvert import __version__
from qconvert.checkpoint.hub_cache import pinned
from qconvert.cli.carry_out import Started
from qconvert.core.errors import QConvertError, UsageError
from qconvert.core.own_process import open_standard_streams
from qconvert.core.say import say, say_error, sign_of_life
from qconvert.core.shown import message

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130  # and FINDINGS, MORE, of options.py

# Commands in the groups and in the order that help lists them, each with its module. One without a group
# cannot be written down.
GROUPS: dict[str, dict[str, str]] = {
    "Start": {
        "advise": "check", "inspect": "check", "demo": "misc", "plan": "convert", "run": "convert",
        "recipes": "misc",
    },
    "Quantize": {
        "fit": "fit", "w4a16": "quantize", "nvfp4": "quantize", "fp8": "quantize", "int8": "quantize",
        "mx": "quantize", "quantize": "quantize", "amx": "kt", "kt": "kt", "dequant": "convert",
    },
    "Reshape": {
        "relabel": "layout", "merge": "merge", "prune": "layout", "experts": "layout", "mtp": "layout",
        "text": "layout", "delta": "merge", "apply": "merge", "fuse": "layout", "unfuse": "layout",
        "prepare": "layout", "unprepare": "layout",
    },
    "Check": {
        "validate": "check", "diff": "check", "eval": "evaluate", "ask": "evaluate", "repair": "check",
        "report": "report",
    },
    "Publish": {"upload": "upload", "sign": "upload", "verify": "upload", "clean": "misc"},
    "Many machines": {
        "split": "stages", "join": "stages", "status": "stages", "finish": "stages",
    },
}  # fmt: skip
_PLACES = {name: place for group in GROUPS.values() for name, place in group.items()}
_ATTRIBUTES = {"eval": "evaluate"}  # where a command's function has another name than it

# Words that people type, with what does it.
_MEANT = {
    "help": "--help", "convert": "run", "quantise": "quantize", "awq": "relabel --to awq",
    "gptq": "w4a16 --gptq", "int4": "w4a16", "w8a16": "w4a16 --bits 8", "w8a8": "int8",
    "rtn": "w4a16 --rtn", "fp4": "nvfp4", "mxfp4": "mx", "mxfp8": "mx --bits 8", "bf16": "dequant",
    "dequantize": "dequant", "gguf": "dequant",
    "check": "validate", "test": "validate", "compare": "diff",
    "info": "inspect", "show": "inspect", "ls": "inspect", "shard": "split",
    "push": "upload", "publish": "upload",
    "perplexity": "eval", "benchmark": "eval", "draft": "mtp", "graft": "mtp graft",
    "recommend": "advise", "stack": "experts stack", "unstack": "experts unstack", "fix": "repair",
    "version": "--version", "lora": "merge", "adapter": "merge",
}  # fmt: skip


# Options that people give a command that has none of the name, with where that is said.
_OPTION_MEANT = {
    "--for": "the lines `loads` of --dry-run say which runtimes load the result; `qconvert validate OUT "
    "--for RUNTIME --tp N` says it of one",
    "--tp": "`qconvert validate OUT --for RUNTIME --tp N` says whether it loads on N ranks",
}  # fmt: skip
_OF_A_STEP = (
    "options of a step stand in the recipe, `- w4a16: {tp: 2}`; "
    "`qconvert recipes passes NAME` lists them"
)


class Commands(MutableMapping[str, click.Command]):
    """The commands by name. A module is imported when its command runs, or when its help is shown: all
    of them took 30 ms of CPU, of which one command needs 8. One that is set is kept beside them."""

    def __init__(self) -> None:
        self._known: dict[str, click.Command | None] = dict.fromkeys(_PLACES)

    def __getitem__(self, name: str) -> click.Command:
        found = self._known[name]
        if found is None:
            module = import_module(f"qconvert.cli.{_PLACES[name]}")
            loaded = getattr(module, _ATTRIBUTES.get(name, name))
            assert isinstance(loaded, click.Command)
            self._known[name] = found = loaded
        return found

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._known[name] = command

    def __delitem__(self, name: str) -> None:
        del self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class Root(click.Group):
    """The command line: its commands in groups, and a word that is none led to the one that is meant."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)  # --help and --version are known

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_paragraph()
        for title, names in GROUPS.items():
            formatter.write_heading(
                title
            )  # a section's blank line would make it more than a screen
            with formatter.indentation():
                rows = [(name, self.commands[name].get_short_help_str(80)) for name in names]
                formatter.write_dl([(f"{name:{_NAME}}", text) for name, text in rows])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if word in self.commands or word.startswith("-"):
            return super().resolve_command(ctx, args)
        raise click.UsageError(f"no command {word!r}{_meant(word)}", ctx)


_NAME = max(map(len, _PLACES))


def _options_of_steps() -> frozenset[str]:
    """Names of what any pass takes, and what is typed of a pass's command alone."""
    from dataclasses import fields

    from qconvert.passes import passes

    kinds: list[Any] = list(passes().values())
    named = {field.name for kind in kinds for field in fields(kind)}
    return frozenset({*named, "channel", "rtn", "gptq", "ue8m0"})


def _meant(word: str) -> str:
    """The end of a message about a word that is no command."""
    from difflib import get_close_matches

    known = {**dict(zip(_PLACES, _PLACES, strict=True)), **_MEANT}
    close = [word] if word in known else get_close_matches(word.lower(), known, 2)
    there = {meant: None for one in close if (meant := known[one]).partition(" ")[0] in _LEADS}
    names = " or ".join(f"`qconvert {meant}`" for meant in there)
    return f"; did you mean {names}?" if names else "; `qconvert --help` lists them"


_LEADS = {*_PLACES, "--help", "--version"}


@click.group(
    cls=Root,
    commands=Commands(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="qconvert")
def cli() -> None:
    """Turn a Hugging Face checkpoint into exactly what a runtime wants to load.

    Example: qconvert advise DeepSeek-V3 --for sglang --gpus 8

    SRC: a folder, .safetensors or GGUF file, s3://..., or ORG/NAME[@REVISION].

    Exit 0 ok, 1 refused, 2 usage, 3 findings, 4 stopped by --until, 5 not known, 130 interrupted
    """
    # A command reads one commit of a repo, wherever its branch goes meanwhile.
    click.get_current_context().with_resource(pinned())


def _terminate(_number: int, _frame: FrameType | None) -> None:
    """SIGTERM ends a run as Ctrl-C does: finished work is kept."""
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit. User errors are one sentence, without a traceback."""
    open_standard_streams()
    signal.signal(signal.SIGTERM, _terminate)
    # A plan is millions of small objects and hardly a cycle. Looking for cycles at every 700 new
    # ones took 40 % of the time of planning 150,000 tensors.
    gc.set_threshold(200_000)
    gc.unfreeze()  # what an earlier command in this process planned
    # Threads for numpy's small matrix products would compete with one another and with our workers.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        words = tuple(sys.argv[1:] if arguments is None else arguments)
        quiet = {"-q", "--quiet", "--json"}.intersection(words)
        with nullcontext() if quiet else sign_of_life(f"reading {' '.join(words)[:60]} ..."):
            code = cli.main(
                arguments, prog_name="qconvert", standalone_mode=False, obj=Started(words)
            )
        sys.exit(code if isinstance(code, int) else OK)
    except click.ClickException as error:
        _say_usage(error)
        sys.exit(USAGE)
    except UsageError as error:
        _say_usage(click.UsageError(str(error)))
        sys.exit(USAGE)
    except QConvertError as error:
        from qconvert.checkpoint.store import named

        say_error(named(str(error)))
        sys.exit(FAILED)
    except ImportError as error:
        from qconvert.core.extras import extra_of, is_installed, lacking

        # numpy and others are imported where they are used: they are broken, or memory is too small.
        package = (error.name or "").partition(".")[0]
        extra = extra_of(package)
        if extra is not None and not is_installed(package):
            say_error(f"this command needs {package}, and {lacking(extra, package)}")
            sys.exit(FAILED)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        say_error(
            f"cannot load a library: {lines[-1] if lines else ''}; reinstall it, or raise the limit of "
            "`ulimit -v`"
        )
        sys.exit(FAILED)
    except (click.Abort, KeyboardInterrupt):
        say(
            "qconvert: interrupted; in a conversion finished work is kept, the same command goes on",
            err=True,
        )
        sys.exit(INTERRUPTED)
    except OSError as error:
        # Raised where no message names the file: name it, without a traceback.
        where = f"{error.filename}: " if error.filename else ""
        say_error(f"{where}{error.strerror or error}")
        sys.exit(FAILED)
    except (MemoryError, RecursionError) as error:
        # The last resort: everything that is read has a limit of size and depth of its own.
        what, limit = ("memory", "-v") if isinstance(error, MemoryError) else ("stack", "-s")
        error.__traceback__ = None  # and with it all that its frames hold
        say_error(
            f"{_command(arguments)}: ran out of {what}; provide more (see `ulimit {limit}`), or convert "
            "a smaller input; report this with the input if others can convert it"
        )
        sys.exit(FAILED)
    finally:
        if "triton" in sys.modules:
            gc.unfreeze()  # nanobind prints a line for each of its objects that is never freed
            gc.enable()


def _command(arguments: list[str] | None) -> str:
    """The name of the command that was typed."""
    words = sys.argv[1:] if arguments is None else arguments
    return next((word for word in words if word in cli.commands), "qconvert")


def _say_usage(error: click.ClickException) -> None:
    """Return what click prints, line by line: its messages quote arguments, which may be names of
    files."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        say(*error.format_message().splitlines(), err=True)  # the help is our own text
        return
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is not None:
        say(*context.get_usage().splitlines(), err=True)
        if context.command.get_help_option(context) is not None:
            names = context.help_option_names
            say(f"Try '{context.command_path} {names[-1]}' for help.", "", err=True)
    # A list of choices, which click puts on lines of their own.
    text = error.format_message().replace(":\n\t", ": ").replace(",\n\t", ", ")
    if isinstance(error, click.NoSuchOption):
        name = "" if context is None else context.command.name
        hint = _OPTION_MEANT.get(error.option_name, "")
        if name == "run" and error.option_name.lstrip("-").replace("-", "_") in _options_of_steps():
            hint = _OF_A_STEP
        text = f"No such option {error.option_name!r}: {hint}." if hint else text
    say(f"Error: {message(text)}", err=True)
