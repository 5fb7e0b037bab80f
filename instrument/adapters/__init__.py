"""Hooks for runtimes that we did not write: one file per runtime, installed before the script's first line."""
