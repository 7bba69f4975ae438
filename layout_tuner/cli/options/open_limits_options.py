"""The options that bound the open searches of a driver, and with them its memory."""

from __future__ import annotations

from typing import Final

import click

from layout_tuner.cli.options.command_options import passed_as, valued_options
from layout_tuner.tuner.driver.open_limits import OpenLimits

_DEFAULT: Final = OpenLimits()

_AT_LEAST_ONE: Final = click.IntRange(min=1)
_OPTIONS: Final = {
    "max_open_layouts": (
        _AT_LEAST_ONE,
        _DEFAULT.in_all,
        "Legal layouts of the searches that are open at once; the others wait for their turn.",
    ),
    "max_open_layouts_of_owner": (
        _AT_LEAST_ONE,
        _DEFAULT.of_owner,
        "The same of the searches of one owner of campaigns.",
    ),
}
"""By option its type, its default and its help."""


def _limits(*, max_open_layouts: int, max_open_layouts_of_owner: int) -> OpenLimits:
    return OpenLimits(of_owner=max_open_layouts_of_owner, in_all=max_open_layouts)


open_limits_options: Final = passed_as(
    "limits", _limits, tuple(_OPTIONS), *valued_options(_OPTIONS)
)
"""Adds the options; passes on `limits`."""


def arguments_of(limits: OpenLimits) -> tuple[str, ...]:
    """The options with which `layout-tuner driver` has these limits."""
    of_owner = ("--max-open-layouts-of-owner", str(limits.of_owner))
    return ("--max-open-layouts", str(limits.in_all), *of_owner)
