"""Predict what a step would take with another schedule, split, link or cost, from the measured costs of its ops and messages."""
