"""Costs of experts on several ranks: their exchanges, the rank that comes last, and what unequal routes take of a step."""
