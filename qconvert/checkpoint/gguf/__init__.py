"""GGUF files as checkpoints: their header, the names and config of the model, the tokenizer."""
