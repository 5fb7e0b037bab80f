"""Words on what recording did to a run, and on what it got wrong."""
