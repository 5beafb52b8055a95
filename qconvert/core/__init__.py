"""What everything stands on: errors, dtypes, names, the lazy graph. Standard library only."""
