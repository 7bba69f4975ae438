"""HTTP: server, limits, documents in requests, errors, OpenAPI pages."""
