"""MXFP4 and MXFP8: E2M1 or E4M3 codes under a power of two for each 32 columns."""
