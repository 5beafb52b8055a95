"""Searches for scales on a GPU.

Only loops that a core runs slower than a disk reads are here: a search tries dozens of scales for each
group and does some hundred operations a weight. Rounding without a search, decoding and packing run at
2 to 9 GB/s on one core (benchmarks/README.md), as fast as a file is read; a GPU would wait for the bus.

A kernel gives the bytes of numpy's form or declines, as a compiled loop does (`qconvert.ops.compiled`),
and ops ask for either in the same way. Whether a run uses a GPU is decided in `choice`, once.
"""
