"""The documents of the HTTP API, and their conversion from the records of the store."""
