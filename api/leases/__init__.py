"""Leases, heartbeats and outcomes of workers, in batches."""
