"""Workers, their leases, allocations and nodes."""
