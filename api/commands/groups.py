"""Groups of commands that talk to a service; a command is imported when it is called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import click

from api.lazy_group import LazyGroup

_CAMPAIGN: Final = {
    "campaign": ("analysis", "cancel", "list_campaigns", "pause", "resume", "show", "table"),
    "campaign_changes": ("clone", "delete", "import_table", "submit", "update"),
    "watching": ("watch",),
}
_MODEL: Final = ("delete_model", "list_models", "put_model", "show_model")
_CLUSTER: Final = ("delete_cluster", "list_clusters", "put_cluster", "show_cluster")
_TRIAL: Final = ("cancel", "list_trials", "log", "repeat", "requeue", "show")
_TOKEN: Final = ("create", "list_tokens", "revoke")


def _sources(functions: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """By command; the first word of a function's name is that of its command."""
    return {
        function.partition("_")[0]: f"api.commands.{module}:{function}"
        for module, names in functions.items()
        for function in names
    }


@click.group(cls=LazyGroup, sources=_sources(_CAMPAIGN))
def campaign() -> None:
    """Submit, follow and steer campaigns."""


@click.group(cls=LazyGroup, sources=_sources({"catalogue": _MODEL}))
def model() -> None:
    """List, show, put and delete models that campaign files name."""


@click.group(cls=LazyGroup, sources=_sources({"catalogue": _CLUSTER}))
def cluster() -> None:
    """List, show, put and delete clusters that campaign files name."""


@click.group(cls=LazyGroup, sources=_sources({"trial": _TRIAL}))
def trial() -> None:
    """List, read, repeat and cancel trials."""


@click.group(cls=LazyGroup, sources=_sources({"token": _TOKEN}))
def token() -> None:
    """Make, list and revoke the tokens of people and workers."""
