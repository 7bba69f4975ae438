"""Predictions of layouts: closed forms, their correction by measurements, and statistics."""
