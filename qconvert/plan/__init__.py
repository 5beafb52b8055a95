"""What shall exist, proved to account for every source byte before any is read."""

import sys

from qconvert import CallablePackage

# `qconvert.plan(...)` is `qconvert.api.plan(...)`.
sys.modules[__name__].__class__ = CallablePackage
