"""`layout-tuner login` and `logout`: sign-ins of a browser, and of this command line."""

from __future__ import annotations

import html
import os
import time
import webbrowser
from collections.abc import Callable
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Final

import click

from layout_tuner.api.formatting import moment
from layout_tuner.cli.options.command_options import connection_options
from layout_tuner.cli.options.refusals import fail, refusals
from layout_tuner.cli.service.service_connection import connect
from layout_tuner.errors import LayoutTunerError
from layout_tuner.protocol.connection.data_home import default_data_dir
from layout_tuner.protocol.connection.kept_sign_in import kept_sign_in
from layout_tuner.protocol.connection.service_address import ServicePlace

if TYPE_CHECKING:
    from layout_tuner.api.schemas.access import DeviceCodeCreated, DeviceToken
    from layout_tuner.client.clients import Client

REDIRECT_FILE: Final = "sign-in.html"

_REDIRECT: Final = """\
<!doctype html>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0;url={url}">
<title>layout-tuner</title>
<a href="{url}">Continue</a>
"""


@click.command()
@click.option("--open", "opens", is_flag=True, help="Also open the address in a browser.")
@click.option(
    "--device",
    is_flag=True,
    help="Sign this command line in instead: a person who opens the address in any browser allows it.",
)
@connection_options
def login(opens: bool, device: bool, locate: Callable[..., ServicePlace]) -> None:
    """Print an address that signs a browser in: once, within ten minutes, with the token's role."""
    with refusals(), connect(locate, is_open=device) as client:
        if device:
            asked = client.create_device_code(gethostname())
            url, how = f"{client.url}/device?code={asked.code}", f"any browser; allow {asked.code}"
            click.echo(f"within ten minutes, in {how}:", err=True)
        else:
            created = client.create_sign_in_code()
            url = sign_in_url(client.url, created.code)
            click.echo(f"until {moment(created.expires_at)}, in one browser:", err=True)
        click.echo(url)
        if opens and not webbrowser.open(_redirect_file(url).as_uri()):
            click.echo("no browser was found here: open the address in one", err=True)
        if device:
            issued = _allowed(client, asked)
            kept_sign_in(client.url).write(issued.model_dump(mode="json"))
            click.echo(f"{issued.name}: {issued.role} until {moment(issued.expires_at)}", err=True)


@click.command()
@connection_options
def logout(locate: Callable[..., ServicePlace]) -> None:
    """End the sign-in by `login --device` at a service, and delete it here."""
    with refusals():
        kept = kept_sign_in(locate(needs_token=False).url)
        if not kept.file.exists():
            fail(f"no sign-in at {kept.url} is kept; `layout-tuner login --device` begins one")
        try:
            with connect(locate) as client:
                client.revoke_device_token()
        except LayoutTunerError as error:
            if getattr(error, "is_temporary", False):
                raise
        kept.file.unlink(missing_ok=True)
        click.echo(f"signed out of {kept.url}")


def _allowed(client: Client, asked: DeviceCodeCreated) -> DeviceToken:
    """Waits until a person has allowed this command line; ServiceError if nobody does."""
    from layout_tuner.client.errors import ServiceError

    ends_at = time.monotonic() + 660  # the service's word comes before
    while True:
        time.sleep(asked.interval_s)
        try:
            return client.create_device_token(asked.secret)
        except ServiceError as error:
            word = error.problem.type.rpartition(":")[2] if error.problem else ""
            is_waiting = error.is_temporary or word == "authorization_pending"
            if not is_waiting or time.monotonic() > ends_at:
                raise


def sign_in_url(service_url: str, code: str) -> str:
    """The address that signs in: browsers do not send the fragment, so no log has the code."""
    return f"{service_url.rstrip('/')}/sign-in#code={code}"


def _redirect_file(url: str) -> Path:
    """A file that leads to the address: all users of a machine can read arguments of processes."""
    directory = default_data_dir(os.environ)
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = directory / REDIRECT_FILE
        file.unlink(missing_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as page:
            page.write(_REDIRECT.format(url=html.escape(url)))
    except OSError as error:
        raise click.ClickException(
            f"the browser cannot be opened: {directory} cannot be written to ({error.strerror}); "
            "open the address by hand"
        ) from error
    return file
