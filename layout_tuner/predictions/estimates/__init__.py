"""Closed-form estimates of memory and time, in numpy."""
