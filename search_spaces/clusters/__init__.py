"""The cluster: its description, presets, measured constants, and its Slurm site."""
