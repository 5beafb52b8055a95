"""Calibrated quantization of models larger than memory: tokens through the model, a decoder layer at a
time. Arithmetic and layers are llm-compressor's and transformers'; what is kept between layers, and
what is read when, is ours.
"""
