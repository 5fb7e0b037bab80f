"""Explain a step: its critical path, and for every nanosecond of bubble the op that caused it."""
