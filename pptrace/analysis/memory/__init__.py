"""Memory of a run: peaks of steps, microbatches in flight, and what its sizes and options come to."""
