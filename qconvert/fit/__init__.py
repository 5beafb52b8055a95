"""The best checkpoint under a budget of bytes: formats measured on the model's output, and one chosen
for every group of modules."""

from qconvert.evaluate.activations import Inputs

# Formats to choose from, in the order in which equal ones are preferred; all under one config of
# compressed-tensors. What writes each: groups.py.
NAMES = (
    "fp8", "fp8-channel", "int8", "w8a16", "nvfp4", "mxfp4", "w4a16-g32", "w4a16-g64", "w4a16-g128",
)  # fmt: skip
# Activations that runtimes quantize beside a format's weights, anew for each token, as
# compressed-tensors' config states them.
ACTIVATIONS: dict[str, Inputs] = {
    "fp8": ("fp8", 128), "fp8-channel": ("fp8", 0), "int8": ("int8", 0),
}  # fmt: skip
