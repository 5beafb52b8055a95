"""Requests to the Hub, through huggingface_hub's client and session, so that HF_ENDPOINT, HF_TOKEN,
HF_HUB_OFFLINE and the rest mean what they mean to it; which failures are retried, and in which words
the others are told.
"""
