"""The HTTP service and the command line; the only home of FastAPI."""
