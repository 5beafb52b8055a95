"""Compiled loops: how numba (the extra `fast`) compiles them, where its cache lies, and whether a run
uses them. No arithmetic: ops and validators have loops of their own, which share nothing with each
other."""
