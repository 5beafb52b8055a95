"""vLLM's loader as a function of a folder's headers and config: what it builds on one rank, and what of
the folder reaches it.

Read in vLLM (`model_executor/models`, `model_executor/layers`, `model_executor/model_loader`)
and compared with that loader itself in tests/loaders/test_simulator_vllm.py. Other versions
are not simulated.
"""
