"""Costs of ops and messages in measured steps, as one matrix per plan."""
