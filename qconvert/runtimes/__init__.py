"""Rules of the programs that serve models: facts read in their loaders, with versions."""
