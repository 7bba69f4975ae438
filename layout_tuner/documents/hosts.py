"""Names and addresses of hosts."""

from __future__ import annotations

import ipaddress
from functools import lru_cache


@lru_cache(16)  # every request names one
def is_loopback_host(name: str) -> bool:
    """Whether a host name or address, without a port, is of the loopback interface."""
    name = name.strip("[]").lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
