"""sglang's loader as a function of a folder's headers and config: what it builds on one rank, and what
of the folder reaches it.

Read in sglang (`srt/models`, `srt/layers`, `srt/model_loader`) and compared with that loader
itself in tests/loaders/test_simulator_sglang.py. Other versions are not simulated.
"""
