"""Causal probes of a run: what a faster kind of op or stage would gain, measured by delaying everything else."""
