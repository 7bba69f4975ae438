"""Known models, clusters and search spaces, and the measured constants of clusters."""
