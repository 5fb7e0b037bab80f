"""What ops and messages cost in measured steps, as one matrix per plan."""
