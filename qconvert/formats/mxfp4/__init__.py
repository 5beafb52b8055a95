"""MXFP4, as compressed-tensors stores it: read alone so far."""
