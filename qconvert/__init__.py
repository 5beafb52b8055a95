"""qconvert: turn a Hugging Face checkpoint into exactly what a runtime wants to load.

A conversion is a compiler run over a checkpoint: headers say what exists, passes rewrite a lazy
plan of what shall exist, and only then are bytes read, computed and written, a small unit at a
time. ARCHITECTURE.md is the map; `qconvert.api` is for Python programs.
"""

__version__ = "0.1.0"
