"""YAML recipes, each opening with whom it serves. Installed as package data of qconvert.recipes."""

if not __name__.startswith("qconvert."):
    raise ImportError("import qconvert.recipes, not recipes")
