"""Recompute: forwards that backwards run again, and the gradients of weights in backwards."""
