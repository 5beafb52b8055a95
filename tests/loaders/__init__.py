"""The runtimes' own loaders, run on a CPU over what qconvert makes."""
