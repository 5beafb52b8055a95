"""The machine room: read, compute, write, remember."""

import sys

from qconvert import CallablePackage

# `qconvert.run(...)` is `qconvert.api.run(...)`.
sys.modules[__name__].__class__ = CallablePackage
