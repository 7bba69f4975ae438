"""The documents of the HTTP API."""
