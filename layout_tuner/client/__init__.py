"""A typed client of the HTTP API, which the commands use too."""

from layout_tuner.client.clients import Client
from layout_tuner.protocol.connection.http_connection import Retries

__all__ = ["Client", "Retries"]
