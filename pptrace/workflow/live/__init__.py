"""Steps of a run that goes on, from the live files of its ranks."""
