"""Comparison of two runs: how much longer a typical step takes, which of its parts changed, and how certain that is."""
