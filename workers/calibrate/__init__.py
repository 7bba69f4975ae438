"""Measures a machine's constants for the estimates."""
