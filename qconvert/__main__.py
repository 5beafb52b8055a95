"""`qconvert` and `python -m qconvert`."""

from qconvert.cli import main as command
from qconvert.core import own_process


def main(arguments: list[str] | None = None) -> None:
    """Run the command line in a process of its own, and exit."""
    own_process.declare()
    command.main(arguments)


if __name__ == "__main__":
    main()
