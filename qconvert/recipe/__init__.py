"""Recipes: YAML in, passes out; llm-compressor's too."""
