"""Sweeps: many schedules, sizes and costs at once."""
