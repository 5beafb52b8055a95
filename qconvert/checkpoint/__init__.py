"""A Hugging Face checkpoint known from its headers: files, family, what its config states."""
