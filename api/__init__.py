"""The HTTP service: routes, pages, reports and live events; the only home of FastAPI."""
