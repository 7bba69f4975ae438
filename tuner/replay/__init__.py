"""Searches over recorded measurements instead of probes, and what they tell of a strategy."""
