"""Integers of msmodelslim, for Ascend NPUs: codes, scales and offsets in floats."""
