"""Campaigns that list their layouts, and the runs of each."""

from __future__ import annotations

import pytest

from results_db.store import Store
from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.errors import SearchSpaceError, SpaceInvalidError
from search_spaces.spec.layout import Layout
from tests.kit.store import completed, failed
from tests.tuner.factories import make_spec, run_campaign

SETTINGS = {
    "strategy": "exhaustive",
    "budget": {},
    "stop": {"early": False, "remeasure": 0},
    "runs": 3,
}


def some_of_the_space(num: int) -> list[Layout]:
    legal = make_spec().legal_set()
    return [legal.layout(place) for place in range(0, len(legal), len(legal) // num)][:num]


def test_only_the_listed_layouts_are_measured_each_as_often_as_asked_in_turn(store: Store) -> None:
    first, broken, second = layouts = some_of_the_space(3)
    spec = make_spec(layouts=[each.to_mapping() for each in reversed(layouts)], **SETTINGS)
    assert CampaignSpec.from_mapping(spec.to_mapping()) == spec
    record = run_campaign(
        store, spec, lambda layout: failed() if layout == broken else completed(layout)
    )
    measured = [trial.layout for trial in store.trials.find(record.id)]
    assert measured == [first, broken, second, first, second, first, second]
    assert (record.state, record.reason, record.num_legal_layouts) == ("COMPLETED", "exhausted", 3)


def test_a_listed_layout_outside_of_the_space_is_refused() -> None:
    outside = Layout(tp=1, num_microbatches=7)
    with pytest.raises(SpaceInvalidError, match=r"layouts: .*mb7.* is not a legal layout"):
        make_spec(layouts=[outside.to_mapping()], **SETTINGS).legal_set()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": 0}, "runs: 0 is not a whole number"),
        ({"layouts": "all"}, "layouts: 'all' is not a list of layouts"),
        ({"layouts": [{"tp": 0}]}, r"layouts\.0: .*tp=0"),
    ],
)
def test_wrong_lists_and_runs_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SearchSpaceError, match=message):
        make_spec(**{**SETTINGS, **changes})
