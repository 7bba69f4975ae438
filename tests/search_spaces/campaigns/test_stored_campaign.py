"""A stored document becomes a campaign, or says what is wrong with it; its parts never fail."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout_tuner.errors import CampaignInvalidError, SearchSpaceError
from layout_tuner.search_spaces.campaigns.campaign_settings import Budget
from layout_tuner.search_spaces.campaigns.stored_campaign import Damaged, StoredCampaign
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.campaigns import spec_of

PARTS = (
    *("name", "model", "cluster", "device_memory_bytes", "hardware", "auto_words", "precisions"),
    *("objectives", "budget", "probe", "baseline", "simulated", "warnings", "start_from"),
    *("knows_earlier", "fields", "damage", "software"),
)

BATCH = {"global_batch_size": 16}


def stored(**changes: Any) -> StoredCampaign:
    return StoredCampaign(document=spec_of().to_mapping() | changes)


def test_a_document_is_the_campaign_that_was_written_and_is_read_once() -> None:
    spec = spec_of(name="once", baseline={"dp": 8}, objective=["tokens_per_s", "memory_headroom"])
    document = spec.to_mapping()
    read = StoredCampaign(document=document).read
    assert read == spec
    assert StoredCampaign(document=dict(document)).read is read
    changed = StoredCampaign(document=document | {"budget": {"trials": 9}})
    assert changed.spec.budget == changed.budget == Budget(trials=9)
    assert StoredCampaign(document=document).spec.budget == spec.budget


def test_parts_are_those_of_the_whole() -> None:
    spec = spec_of(
        baseline={"dp": 8},
        objective=["tokens_per_s", "memory_headroom"],
        warnings=["w"],
        start_from=["a"],
    )
    found = StoredCampaign(document=spec.to_mapping())
    assert isinstance(spec.baseline, Layout)
    for part in ("name", "model", "cluster", "budget", "probe", "baseline", "simulated"):
        assert getattr(found, part) == getattr(spec, part), part
    assert (found.objectives, found.warnings) == (spec.objectives, spec.warnings)
    assert (found.start_from, found.knows_earlier, found.damage) == (("a",), True, "")
    assert found.device_memory_bytes == spec.cluster.device_memory_bytes
    assert found.precisions == ("bf16",)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (["no", "mapping"], "the campaign is ['no', 'mapping'], not a mapping"),
        (None, "the campaign is None, not a mapping"),
        (spec_of().to_mapping() | {"color": "red"}, "unknown campaign field 'color'"),
        (spec_of().to_mapping() | {"layouts": None}, "layouts: None is not a list of layouts"),
        (spec_of().to_mapping() | {"seed": "a lot"}, "seed: 'a lot' is not a whole number"),
        (spec_of().to_mapping() | {"space": {**BATCH, "tp": "a lot"}}, "space.tp: 'a lot'"),
    ],
)
def test_a_damaged_document_says_why_each_time_and_is_kept_for_display(
    document: Any, said: str
) -> None:
    for _ in range(2):
        found = StoredCampaign(document=document)
        assert isinstance(found.read, Damaged)
        assert found.read.document == document
        assert said in found.damage
        with pytest.raises(CampaignInvalidError if "space" not in said else SearchSpaceError) as e:
            _ = found.spec
        assert said in str(e.value)


def test_a_damaged_part_is_none_and_the_others_are_read() -> None:
    found = stored(model={"name": "tiny", "wings": 2}, budget={"trials": "many"})
    assert (found.model, found.budget) == (None, Budget())
    assert found.cluster == spec_of().cluster
    assert "wings" in found.damage


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
DOCUMENT = spec_of().to_mapping()
SECTIONS = [name for name, value in DOCUMENT.items() if isinstance(value, dict)]


@given(field=st.sampled_from([*DOCUMENT, "simulated", "added"]), value=VALUES)
def test_no_value_of_a_field_keeps_any_part_from_being_shown(field: str, value: Any) -> None:
    found = stored(**{field: value})
    for part in PARTS:
        getattr(found, part)


@given(data=st.data(), section=st.sampled_from(SECTIONS), value=VALUES)
def test_no_value_inside_of_a_section_does(data: st.DataObject, section: str, value: Any) -> None:
    field = data.draw(st.sampled_from([*DOCUMENT[section], "auto", "added"]))
    found = stored(**{section: DOCUMENT[section] | {field: value}})
    for part in PARTS:
        getattr(found, part)
