"""Usual losses of formats, in words beside a role's SQNR.

Figures: normally distributed weights of 1,024 columns (for scales a row 7,168, too), rounded to nearest
by qconvert's passes and measured as `validate` does (tests/test_usual.py does it again). Trained weights
have outliers, so that rows lose more; a search or a calibration changes it by a dB or two.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isnan

from qconvert.validation.reports.figures import Group

# Least and most SQNR in dB, by the format that a measure names.
USUAL: Mapping[str, tuple[float, float]] = {
    "fp8": (31.4, 31.6),  # blocks of 128, or of 32 with scales that are exponents
    "w4a16": (16.0, 20.6),  # a scale a row .. groups of 32
    "w8a16": (40.5, 43.1),
    "w8a8": (40.5, 41.7),
    "nvfp4": (20.3, 20.6),
    "mxfp4": (18.9, 19.1),
    "amxint4": (15.5, 17.0),  # a scale a row
    "amxint8": (40.5, 42.2),
}
CALIBRATED = (
    "calibrated codes lie further from the weights than rounded ones, and nearer in what they compute: "
    "`qconvert eval` measures that"
)
_SLACK = 3.0  # dB: trained weights beside normal ones
_APART = 6.0  # dB: twice the error


def compared(group: Group) -> str:
    """Compare a role's median, and its worst matrix, with what the format usually loses; "" for what is
    exact, unknown or of a format without a usual loss."""
    usual = USUAL.get(group.format)
    if usual is None or isnan(group.median) or group.worst == inf:
        return ""
    low, high = usual
    said = f"usual for {group.format} that is rounded ({low:g} to {high:g} dB)"
    if group.median == inf:
        word = "most are exact"
    elif group.median > high + _SLACK:
        word = f"better than {said}"
    elif group.median < low - _SLACK:
        word = f"worse than {said}"
    else:
        word = f"as {said}"
    if group.worst < min(low, group.median) - _APART:
        word += "; its worst matrix stands apart"
    return word
