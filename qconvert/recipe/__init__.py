"""Recipes: YAML in, passes out; also llm-compressor's."""
