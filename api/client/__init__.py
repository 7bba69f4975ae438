"""Typed clients of the HTTP API, `Client` and `AsyncClient`; the commands use `Client`."""

from api.client.clients import AsyncClient, Client
from api.client.sending import Retries

__all__ = ["AsyncClient", "Client", "Retries"]
