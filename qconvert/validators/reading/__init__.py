"""The reader of stored weights that all validators share."""
