"""The command `qconvert`: its exit codes, and errors as one sentence. The commands are in the files
beside this one; none imports numpy or torch before something is computed."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator, MutableMapping
from importlib import import_module
from types import FrameType

import click

from qconvert import __version__
from qconvert.checkpoint.hub_cache import pinned
from qconvert.cli.carry_out import Started
from qconvert.core.errors import QConvertError, UsageError
from qconvert.core.own_process import open_standard_streams
from qconvert.core.say import say, say_error
from qconvert.core.shown import message

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130  # and FINDINGS, MORE, of options.py

# By module, the commands with the names that they have there.
_MODULES = {
    "check": ("inspect", "validate", "diff"),
    "advise": ("advise",),
    "convert": ("plan", "run", "dequant"),
    "layout": ("fuse", "unfuse", "experts", "relabel", "prepare", "unprepare", "mtp", "text"),
    "kt": ("amx", "kt"),
    "quantize": ("w4a16", "nvfp4", "fp8", "int8", "mx", "quantize"),
    "stages": ("split", "join"),
    "shards": ("finish", "status"),
    "evaluate": ("evaluate",),
    "repair": ("repair",),
    "upload": ("upload",),
    "misc": ("recipes", "clean", "demo"),
    "report": ("report",),
}
_PLACES = {name: (module, name) for module, names in _MODULES.items() for name in names}
_PLACES["eval"] = _PLACES.pop("evaluate")


class Commands(MutableMapping[str, click.Command]):
    """The commands by name. A module is imported when its command runs, or when its help is shown: all
    of them took 30 ms of CPU, of which one command needs 8. One that is set is kept beside them."""

    def __init__(self) -> None:
        self._known: dict[str, click.Command | None] = dict.fromkeys(_PLACES)

    def __getitem__(self, name: str) -> click.Command:
        found = self._known[name]
        if found is None:
            module, attribute = _PLACES[name]
            loaded = getattr(import_module(f"qconvert.cli.{module}"), attribute)
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


@click.group(
    commands=Commands(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="qconvert")
def cli() -> None:
    """Turn a Hugging Face checkpoint into exactly what a runtime wants to load.

    Streams in bounded memory, resumes where it was interrupted, accounts for every byte. A source
    is a folder, one .safetensors or GGUF file, a folder in a store (s3://...), or a repo on the Hub:
    ORG/NAME, with hf:// before it or @REVISION behind it, read by ranges where the local cache lacks it.

    \b
    Examples:
      qconvert inspect DeepSeek-V3
      qconvert dequant DeepSeek-V3 DeepSeek-V3-bf16 --dry-run
      qconvert dequant DeepSeek-V3 DeepSeek-V3-bf16
      qconvert validate DeepSeek-V3-bf16 --against DeepSeek-V3

    Exit codes: 0 ok, 1 refused or failed, 2 usage, 3 findings or differences, 4 more to do (--until),
    5 not known for this class or version (--for), 130 interrupted.
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
        code = cli.main(arguments, prog_name="qconvert", standalone_mode=False, obj=Started(words))
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
    say(f"Error: {message(text)}", err=True)
