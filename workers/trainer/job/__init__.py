"""The training job: its file, data, checkpoints and log."""
