"""A typed client of the HTTP API, which the commands use too."""
