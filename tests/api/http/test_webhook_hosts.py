"""Which addresses webhooks may have."""

from __future__ import annotations

import pytest

from layout_tuner.api.http.webhook_hosts import read_hosts, refuse_address, refuse_private
from layout_tuner.results_db.errors import WebhookInvalidError

HOSTS = read_hosts(["hooks.example.org", "*.wild.test:8443", "http://chat", "[2001:DB8::1]"])


def test_hosts_are_origins_with_their_ports() -> None:
    assert {
        "https://hooks.example.org:443",
        "https://*.wild.test:8443",
        "http://chat:80",
        "https://2001:db8::1:443",
    } == HOSTS


@pytest.mark.parametrize(
    ("address", "may_be_private"),
    [
        ("https://hooks.example.org/a?b=c", True),
        ("https://HOOKS.example.org:443/a", True),
        ("https://a.b.wild.test:8443/", False),
        ("http://chat/hooks/x", True),
        ("https://[2001:db8::1]/", True),
        ("https://*.wild.test:8443/", False),
    ],
)
def test_allowed_addresses_pass(address: str, may_be_private: bool) -> None:
    assert refuse_address(address, HOSTS) is may_be_private


@pytest.mark.parametrize(
    "address",
    [
        "http://hooks.example.org/",
        "https://hooks.example.org:8443/",
        "https://hooks.example.org.evil.test/",
        "https://evil.test/hooks.example.org",
        "https://evil.test#@hooks.example.org/",
        "https://wild.test:8443/",
        "https://chat/",
        "https://hooks.example.org\\@evil.test/",
        "https://hooks.example.org\n.evil.test/",
        "https://hooks.example.org:99999/",
        "//hooks.example.org/",
        "",
    ],
)
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(WebhookInvalidError):
        refuse_address(address, HOSTS)


@pytest.mark.parametrize(
    "ip",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.64.0.1"),
        *("0.0.0.0", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "fec0::1"),
        *("ff02::1", "::ffff:10.0.0.1", "::ffff:8.8.8.8", "64:ff9b::a00:1", "2002:a00:1::"),
    ],
)
def test_private_addresses_are_refused(ip: str) -> None:
    with pytest.raises(WebhookInvalidError, match="is private"):
        refuse_private(ip)


@pytest.mark.parametrize("ip", ["8.8.8.8", "2606:4700::1111"])
def test_public_addresses_pass(ip: str) -> None:
    refuse_private(ip)


@pytest.mark.parametrize("host", ["", "ftp://a", "a/b", "a b", "user@a", "https://"])
def test_a_wrong_host_is_refused(host: str) -> None:
    with pytest.raises(WebhookInvalidError, match=r"^--webhook-hosts '.*' is not a host such as"):
        read_hosts([host])
