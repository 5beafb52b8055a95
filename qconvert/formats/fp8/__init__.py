"""FP8 with scales of blocks or rows, in both dialects."""
