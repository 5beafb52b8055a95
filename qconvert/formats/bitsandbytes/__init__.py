"""bitsandbytes: NF4 and FP4 in blocks of the flattened matrix, and INT8 with a scale a row."""
