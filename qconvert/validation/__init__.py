"""The run of validators, and their reports."""
