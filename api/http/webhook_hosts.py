"""The addresses to which webhooks may go: an administrator's list of hosts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from ipaddress import IPv6Network, ip_address
from typing import Final

from layout_tuner.results_db.errors import WebhookInvalidError

_ORIGIN: Final = r"(?:(https?)://)?([A-Za-z0-9*._-]+|\[[0-9A-Fa-f:]+\])(?::(\d{1,5}))?"
_HOST: Final = re.compile(_ORIGIN + "/?")
_ADDRESS: Final = re.compile("(?=https?://)" + _ORIGIN + "(?:/[!-~]*)?")
_GLOBAL_IPV6: Final = IPv6Network("2000::/3")


def read_hosts(given: Iterable[str]) -> frozenset[str]:
    """The origins of --webhook-hosts, such as https://*.example.org:443 for *.example.org.

    Raises WebhookInvalidError for what is not a host.
    """
    return frozenset(
        _origin(
            _HOST,
            text.strip(),
            f"--webhook-hosts {text[:80]!r} is not a host such as hooks.example.org or http://chat:80",
        )
        for text in given
    )


def refuse_address(address: str, hosts: Collection[str]) -> bool:
    """Returns whether an address may be a private one: the administrator named exactly its host.

    Raises WebhookInvalidError if it is not allowed.
    """
    why = f"address {address[:80]!r} is not such as https://hooks.example.org/x, without a user"
    origin = _origin(_ADDRESS, address, why)
    if not any(fnmatchcase(origin, each) for each in hosts):
        raise WebhookInvalidError(
            f"{origin[:200]} is not a host that an administrator allows with `serve --webhook-hosts`: "
            f"{', '.join(sorted(hosts)) or 'none is'}"
        )
    return origin in hosts and "*" not in origin


def refuse_private(host: str) -> None:
    """Raises WebhookInvalidError for an IP address that is not of the public internet."""
    ip = ip_address(host)
    # Of IPv6, none that holds an IPv4 address.
    is_plain = ip.version == 4 or (ip in _GLOBAL_IPV6 and not (ip.sixtofour or ip.teredo))
    if not ip.is_global or ip.is_multicast or not is_plain:
        raise WebhookInvalidError(
            f"{host} is private, and `serve --webhook-hosts` does not name exactly this host"
        )


def _origin(pattern: re.Pattern[str], text: str, why: str) -> str:
    if (read := pattern.fullmatch(text)) is None:
        raise WebhookInvalidError(why)
    scheme, host = read[1] or "https", read[2].strip("[]").lower()
    return f"{scheme}://{host}:{int(read[3] or (80 if scheme == 'http' else 443))}"
