"""`layout-tuner login`: an address with which a browser signs in to the pages."""

from __future__ import annotations

import html
import os
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from layout_tuner.api.formatting import moment
from layout_tuner.cli.service.service_connection import service_options
from layout_tuner.protocol.connection.data_home import default_data_dir

if TYPE_CHECKING:
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
@service_options
def login(opens: bool, client: Client) -> None:
    """Print an address that signs a browser in: once, within ten minutes, with the token's role."""
    created = client.create_sign_in_code()
    url = sign_in_url(client.url, created.code)
    click.echo(f"until {moment(created.expires_at)}, in one browser:", err=True)
    click.echo(url)
    if opens and not webbrowser.open(_redirect_file(url).as_uri()):
        click.echo("no browser was found here: open the address in one", err=True)


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
