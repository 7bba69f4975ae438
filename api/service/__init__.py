"""What the routes call, and the background jobs of the service."""
