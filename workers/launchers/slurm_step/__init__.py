"""The srun launcher: one Slurm step for each group of ranks."""
