"""One check a file, a function under `@validator`: found by file, imported as `qconvert.validators`.

A validator reads a finished output (and its source, if given) and yields findings. It never
imports the code that made the output.
"""

if not __name__.startswith("qconvert."):
    # Imported by its folder name it would be a second module whose classes differ from ours.
    raise ImportError("import qconvert.validators, not validators")
