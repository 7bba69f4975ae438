"""Allocations of a Slurm site: what the site needs, the batch script, and the jobs that run it."""
