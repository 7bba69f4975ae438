"""Trainers: an adapter for each, with its configuration, refusals and log; and exports."""
