"""Workers, their allocations and nodes."""
