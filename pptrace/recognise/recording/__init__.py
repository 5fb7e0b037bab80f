"""The cost of recording a run, and the run without it."""
