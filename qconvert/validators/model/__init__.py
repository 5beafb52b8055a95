"""What transformers computes with both folders."""
