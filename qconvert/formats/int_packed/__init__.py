"""INT4 and INT8 in I32 words: compressed-tensors' and GPTQ's forms."""
