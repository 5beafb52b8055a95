"""Every error a user can meet. Each message names the tensor or file, what was expected, what was
found and what to do; the command line prints it as one sentence, without a traceback, and exits 1 (2
for a UsageError).
"""


class QConvertError(Exception):
    """Base of all refusals and failures that are about the user's data, plan or machine."""


class UsageError(QConvertError):
    """An argument that is invalid by its own text, whatever files and folders hold: an unknown name, a
    malformed size, options that exclude one another. The command line exits 2."""


class CheckpointError(QConvertError):
    """The source (or an output being read back) is not a valid checkpoint."""


class PlanError(QConvertError):
    """The plan cannot be carried out, or would lose or invent bytes. Nothing has been read."""


class RecipeError(QConvertError):
    """A recipe file is not valid; the message carries its line."""


class DataError(QConvertError):
    """Calibration data that cannot be used; the message carries file and line."""


class OutputError(QConvertError):
    """The output folder cannot be used: foreign, locked, read-only, disk too small, another plan."""


class LoaderError(QConvertError):
    """The interpreter that --loader names has no such runtime, or its loader cannot be run; the message
    ends with what it printed last."""


class RunError(QConvertError):
    """A failure while data was being converted. Nothing was published; the work is resumable."""


class RowError(RunError):
    """Invalid data in one row. `row` counts from the first row of the op's arguments
    (or, if `by_column`, from their first column); a caller that knows the tensor adds its name to the
    message."""

    def __init__(self, row: int, what: str, *, by_column: bool = False) -> None:
        super().__init__(f"{'column' if by_column else 'row'} {row} {what}")
        self.row = row
        self.what = what
        self.by_column = by_column


class ScaleError(RunError):
    """An invalid scale, or a scale that makes an invalid value. `index` counts the elements of the
    scales that the op was given, which are its argument `argument`; a caller that knows the tensor adds
    its name to the message."""

    def __init__(self, index: int, what: str, *, argument: int = 1) -> None:
        super().__init__(f"scale {index} {what}")
        self.index = index
        self.what = what
        self.argument = argument
