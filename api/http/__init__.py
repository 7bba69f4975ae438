"""HTTP: server, limits, documents in requests, errors, entity tags, OpenAPI pages."""
