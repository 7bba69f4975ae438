"""Layouts, models, clusters, sites, search spaces, rules of legality, and objectives."""
