"""What the programs that serve models load: facts read in their loaders, with versions."""
