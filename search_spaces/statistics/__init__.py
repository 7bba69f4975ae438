"""Confidence intervals, pooling of repeated runs, comparison of losses, early stop."""
