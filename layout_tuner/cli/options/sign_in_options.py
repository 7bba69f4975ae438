"""The options of signing in by a provider or a proxy, for `serve` and `up` alike."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Final, get_args

import click

from layout_tuner.api.security.sign_in_options import DefaultRole, SignInOptions
from layout_tuner.cli.options.command_options import passed_as

_TYPES: Final = {
    "oidc_client_secret_file": click.Path(dir_okay=False, path_type=Path),
    "default_role": click.Choice(get_args(DefaultRole)),
}

sign_in_options: Final = passed_as(
    "sign_in",
    SignInOptions,
    [each.name for each in fields(SignInOptions)],
    *(
        click.option(
            f"--{each.name.replace('_', '-')}",
            type=_TYPES.get(each.name),
            default=each.default,
            show_default=bool(each.default),
            multiple=isinstance(each.default, tuple),
            envvar=f"LAYOUT_TUNER_{each.name.upper()}",
            help=each.metadata["help"],
        )
        for each in fields(SignInOptions)
    ),
)
"""Adds the options; passes the command `SignInOptions`."""
