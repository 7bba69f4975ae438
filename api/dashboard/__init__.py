"""Pages for the browser: rendered on the server from the store, on the same data as the API."""
