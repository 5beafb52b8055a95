"""Codes that lose less than llm-compressor's in the same bytes.

A matrix W [N, K] is to be replaced by codes whose outputs differ least over the samples: for each row,
d H d^T with d what codes mean less W, and H the damped Hessian of the inputs. Rows do not depend on one
another. All of this works on columns first ([B, K, N]): a column of all rows is then contiguous, and the
loops over columns run 2 to 3 times as fast on a CPU.
"""
