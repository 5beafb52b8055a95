"""Every weight of a plan: where it is, in what form, how it is read."""
