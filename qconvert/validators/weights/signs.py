"""Rule for matrices whose scales may be below 0. Not a validator itself: it has no `VALIDATOR`, so
discovery skips it.

Codes of symmetric INT4 are -8 to 7, and a scale below 0 turns that range around. AutoRound 0.15
(`data_type/int.py`) writes such scales, llama.cpp's Q4_0 has them, and runtimes only multiply by them; a
folder of qconvert's holds them where its manifest says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qconvert.validators.headers.conversions import FACT as CALIBRATION
from qconvert.validators.reading.forms import Form


def may_be_negative(manifest: Mapping[str, Any] | None, form: Form) -> bool:
    """Of a matrix that is stored so, in a folder with this manifest, or none."""
    codes = form.codes
    if codes is None or codes.bits != 4 or not codes.symmetric or codes.signed:
        return False
    made = [step for step in (manifest or {}).get("passes", ()) if step.get("name") == "w4a16"]
    if not made:
        return True
    said = (manifest or {}).get(CALIBRATION)
    if isinstance(said, dict) and said.get("signs") == "both" and said.get("scales") == "search":
        return True
    signed = {"scales": "search", "signs": "both", "symmetric": True, "bits": 4}
    return any(signed.items() <= step["options"].items() for step in made)
