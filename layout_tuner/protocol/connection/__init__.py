"""The connection of a process to its service: address, token, TLS, HTTP, outages."""
