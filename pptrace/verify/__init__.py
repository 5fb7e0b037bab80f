"""Really run a plan: one process per pipeline rank, ops that sleep as long as theirs took, and messages of the size of theirs."""
