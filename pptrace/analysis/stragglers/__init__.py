"""Study of slow workers, stages, kinds of ops, microbatches and links, and of pauses of the host."""
