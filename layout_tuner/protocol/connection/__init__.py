"""How a process finds and reaches its service."""
