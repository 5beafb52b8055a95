"""What the programs that serve models take: facts read in their loaders, with versions."""
