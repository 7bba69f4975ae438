"""Layouts, models, clusters, and the campaigns and search spaces over them.

Its lower floors describe one layout, model or cluster. A campaign and its tables stand above the
estimates, which check them (docs/architecture.md).
"""
