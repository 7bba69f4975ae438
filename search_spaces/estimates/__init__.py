"""Closed-form estimates, numpy only; constants are passed in."""
