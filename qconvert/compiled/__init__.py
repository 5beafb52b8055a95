"""How loops are compiled by numba (the extra `fast`), and whether a run computes in them. No arithmetic:
ops have loops of their own, and validators have others, which share nothing with those."""
