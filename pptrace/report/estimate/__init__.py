"""Estimates of a model on a mesh, as columns and as tables."""
