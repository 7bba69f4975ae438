"""Campaigns: submission, imports, models and clusters by name, progress, and tables of results."""
