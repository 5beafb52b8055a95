"""Families that no file of `layouts/` describes, read from the class that transformers has for a config.

`classes/` holds what that reading came to for every class of transformers, a file each, so that
most models need no transformers. `transformers_class.py` does the reading, in a process of its own.
"""
