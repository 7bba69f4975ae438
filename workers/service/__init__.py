"""The worker's side of the connection to the service."""
