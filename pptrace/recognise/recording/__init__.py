"""What recording did to a run, and the run without it."""
