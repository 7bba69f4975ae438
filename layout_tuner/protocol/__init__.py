"""The documents that service and worker exchange."""
