"""Leases, heartbeats and outcomes of workers, in batches, and why a trial is not leased."""
