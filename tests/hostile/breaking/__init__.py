"""Ways to break what qconvert reads, one subject a file. Each has a `MUTATIONS`."""

from hostile.breaking import (
    arguments,
    calibration,
    configs,
    contents,
    forms,
    headers,
    indexes,
    leftovers,
    recipes,
    shards,
    sidefiles,
    sound,
)

MODULES = (
    sound, headers, indexes, configs, sidefiles, forms, contents, leftovers, shards, recipes,
    calibration, arguments,
)  # fmt: skip
