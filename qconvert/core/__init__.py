"""The base of everything: errors, dtypes, names, the lazy graph. Standard library only."""
