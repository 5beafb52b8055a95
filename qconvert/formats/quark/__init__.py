"""Integers of AMD Quark: INT4 in I32 words along the outputs, INT8 a byte each."""
