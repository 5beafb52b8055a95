"""Relative error of each matrix of a converted checkpoint, the largest first.

python compare_weights.py DeepSeek-V3 DeepSeek-V3-w4a16

Both may be folders, repos on the Hub (ORG/NAME, read by ranges) or s3:// URLs; one matrix of each is in
memory at a time.
"""

import sys

import numpy as np

import qconvert


def main(source: str, made: str) -> None:
    """Print an error, how the matrix is stored, and its name, for all that are stored otherwise."""
    found = []
    with qconvert.open(source) as before, qconvert.open(made) as after:
        for name in before.keys() & after.keys():
            one, other = before[name], after[name]
            if one.stored != other.stored:
                a, b = one.dequantize(), other.dequantize()
                found.append((np.linalg.norm(b - a) / np.linalg.norm(a), other.stored, name))
    for error, stored, name in sorted(found, reverse=True):
        print(f"{error:.4f}  {stored}  {name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
