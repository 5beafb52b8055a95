"""Types of ggml: blocks of codes with their scales, and numbers that a GGUF file arranges otherwise."""
