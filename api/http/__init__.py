"""HTTP: server, limits of connections and rates, documents in requests, errors, API pages."""
