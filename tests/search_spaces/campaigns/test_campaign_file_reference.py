"""The reference of the campaign file lists every field and knob that is accepted, and no other."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.campaigns.campaign_settings import (
    Budget,
    Constraints,
    ProbeSettings,
    StopSettings,
)
from search_spaces.spec.objectives import ALL_OBJECTIVES
from search_spaces.spec.presets.clusters import CLUSTER_PRESETS
from search_spaces.spec.presets.models import MODEL_PRESETS
from search_spaces.spec.space import SearchSpace

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "campaign-file.md"


def table_after(heading: str) -> set[str]:
    """The names in the first column of the first table below a heading."""
    below = REFERENCE.read_text(encoding="utf-8").split(f"\n{heading}\n", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", below, flags=re.MULTILINE)
    assert table is not None
    rows = table[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


@pytest.mark.parametrize(
    ("heading", "described", "written"),
    [
        ("## Fields", CampaignSpec, {"objectives": {"objective"}}),
        ("### `budget`", Budget, {"wall_time_s": {"wall_time", "wall_time_s"}}),
        ("### `probe`", ProbeSettings, {"deadline_s": {"deadline", "deadline_s"}}),
        ("### `stop`", StopSettings, {}),
        ("### `constraints`", Constraints, {}),
        ("## The space", SearchSpace, {}),
    ],
)
def test_the_tables_have_every_field(
    heading: str, described: type, written: dict[str, set[str]]
) -> None:
    names = (written.get(field.name, {field.name}) for field in fields(described))
    assert table_after(heading) == set().union(*names)


@pytest.mark.parametrize("name", [*MODEL_PRESETS, *CLUSTER_PRESETS, *ALL_OBJECTIVES])
def test_every_preset_and_objective_is_named(name: str) -> None:
    assert f"`{name}`" in REFERENCE.read_text(encoding="utf-8")
