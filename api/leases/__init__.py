"""Leases, heartbeats and outcomes of workers in batches; reasons why a trial is not leased."""
