"""One model family a file, each a `FAMILY`: found by file, imported as `qconvert.layouts`.

The folder is linked from the top of the repository, because families are what most contributors add.
"""

if not __name__.startswith("qconvert."):
    # Imported by its folder name it would be a second module whose classes differ from ours.
    raise ImportError("import qconvert.layouts, not layouts")
