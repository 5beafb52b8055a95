"""Quality lost by a conversion: the model and its source run on the same tokens, a decoder layer of
each in memory at a time, and their logits compared.
"""
