"""One model family a file, each a `FAMILY`: found by file, imported as `qconvert.layouts`.

The folder stands at the top of the repository because families are what most contributors add; a
link inside the package installs it.
"""

if not __name__.startswith("qconvert."):
    # Imported by its folder name it would be a second module whose classes equal none of ours.
    raise ImportError("import qconvert.layouts, not layouts")
