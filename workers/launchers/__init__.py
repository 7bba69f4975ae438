"""Launchers, which start the ranks of a probe: local, Ray, srun and simulated."""
