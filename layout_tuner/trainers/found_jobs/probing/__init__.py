"""Measuring a found job: by the log that it printed, and by probes with its own command."""
