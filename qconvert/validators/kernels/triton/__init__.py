"""The kernels, each beside a reference in torch. Imported where they run."""
