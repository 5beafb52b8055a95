"""The kernels, each with a reference in torch. Imported where they run."""
