"""A typed client of the HTTP API, which the commands use too."""

from api.client.clients import Client
from api.client.sending import Retries

__all__ = ["Client", "Retries"]
