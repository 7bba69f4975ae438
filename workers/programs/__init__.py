"""Probes with trainers that are programs of their own."""
