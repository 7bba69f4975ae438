"""The options of the address that the service listens on, for `serve` and `up` alike."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Final

import click

from layout_tuner.api.http.bind_address import LOCAL_PROXIES, Endpoint
from layout_tuner.cli.options.command_options import passed_as

endpoint_options: Final = passed_as(
    "endpoint",
    Endpoint,
    [field.name for field in fields(Endpoint)],
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
    click.option(
        "--port",
        type=click.IntRange(0, 65535),
        default=8080,
        show_default=True,
        help="Port to listen on; 0 takes a free one.",
    ),
    click.option(
        "--tls-certificate", type=click.Path(path_type=Path), help="Certificate to serve TLS with."
    ),
    click.option("--tls-key", type=click.Path(path_type=Path), help="The certificate's key."),
    click.option(
        "--behind-proxy",
        "is_behind_proxy",
        is_flag=True,
        help="A proxy before the service encrypts: plain HTTP beyond loopback is allowed.",
    ),
    click.option(
        "--proxy",
        "proxies",
        multiple=True,
        default=LOCAL_PROXIES,
        help="Address or network of the proxy, which is believed for whom it asks (X-Forwarded-For); may be "
        "repeated. By default this machine.",
    ),
    click.option(
        "--url-prefix",
        default="/",
        metavar="PATH",
        help="Path below which the proxy shows the service, such as /tuner; it may remove the path or not.",
    ),
)
"""Adds --host, --port and the options for TLS and proxies; passes the command an `Endpoint`."""
