"""The running process: its start, its lock, its background jobs, and its metrics."""
