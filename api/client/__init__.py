"""Typed clients of the HTTP API, `Client` and `AsyncClient`; the command line is made of the former."""

from api.client.clients import AsyncClient, Client
from api.client.retries import Retries

__all__ = ["AsyncClient", "Client", "Retries"]
