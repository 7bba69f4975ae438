"""Allocations of a Slurm site: the site, the batch script, and the jobs."""
