"""How numba (the extra `fast`) compiles loops, how their object code is kept and run without it, and
whether a run computes in them. No arithmetic: ops have loops of their own, and validators have others,
which share nothing with those."""
