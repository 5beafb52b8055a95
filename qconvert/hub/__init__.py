"""The Hugging Face Hub: folders sent there and proved to have arrived, headers read from there.

All talk goes through huggingface_hub's client, so HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and the rest
mean what they mean to it.
"""
