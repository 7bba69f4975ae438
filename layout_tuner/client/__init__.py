"""A typed client of the HTTP API, which the commands use too."""

from api.client.clients import Client
from search_spaces.connection.http_connection import Retries

__all__ = ["Client", "Retries"]
