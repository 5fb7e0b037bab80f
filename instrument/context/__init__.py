"""Context parallelism: one sequence over several ranks, and attention over all of it."""
