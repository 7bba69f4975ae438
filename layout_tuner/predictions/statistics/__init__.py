"""Confidence intervals, pooling of repeated runs, early stop."""
