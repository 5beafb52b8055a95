"""Integers of 2 to 8 bits in I32 words: compressed-tensors' and GPTQ's forms."""
