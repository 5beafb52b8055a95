"""Parts that the simulators of sglang's and vLLM's loaders share: parameters and how a tensor gets into
each, ways of storing weights, and the account of what a load does."""
