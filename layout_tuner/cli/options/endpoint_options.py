"""The options of the address that the service listens on, for `serve` and `up` alike."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import click

from layout_tuner.api.http.bind_address import LOCAL_PROXIES, Endpoint
from layout_tuner.api.http.sign_in_options import SignInOptions
from layout_tuner.cli.options.command_options import passed_as

_SIGN_IN: Final = {each.name: each for each in fields(SignInOptions)}
_ENDPOINT: Final = {each.name for each in fields(Endpoint)} - {"sign_in"}


def _endpoint(**given: Any) -> Endpoint:
    sign_in = SignInOptions(**{name: given.pop(name) for name in _SIGN_IN})
    return Endpoint(**given, sign_in=sign_in)


endpoint_options: Final = passed_as(
    "endpoint",
    _endpoint,
    [*_ENDPOINT, *_SIGN_IN],
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
    *(
        click.option(
            f"--{name.replace('_', '-')}",
            type=click.Choice(each.metadata["choices"]) if each.metadata["choices"] else str,
            default=each.default,
            show_default=bool(each.default),
            multiple=isinstance(each.default, tuple),
            envvar=f"LAYOUT_TUNER_{name.upper()}",
            help=each.metadata["help"],
        )
        for name, each in _SIGN_IN.items()
    ),
)
"""Adds the options of address, TLS, proxies and sign-in; passes the command an `Endpoint`."""
