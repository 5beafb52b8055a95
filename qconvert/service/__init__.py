"""Application: what programs and commands ask for, from options to results."""
