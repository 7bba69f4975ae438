"""Known models, clusters and search spaces."""
