"""Replay of searches over measurement tables, which compares strategies without probes."""
