"""What a campaign's `stop` may say."""

from __future__ import annotations

from typing import Any

import pytest

from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.campaigns.campaign_settings import StopSettings
from search_spaces.errors import CampaignInvalidError


def make_spec(**changes: Any) -> CampaignSpec:
    document = {
        "name": "first",
        "model": "tiny",
        "cluster": "frontier",
        "space": {"global_batch_size": 16},
        "budget": {"trials": 3},
    }
    return CampaignSpec.from_mapping({**document, **changes})


def test_probes_end_early_and_the_top_is_measured_again_unless_told_otherwise() -> None:
    assert make_spec().stop == StopSettings(early=True, converged_within=None, remeasure=3)


def test_a_campaign_keeps_what_it_was_told_about_stopping() -> None:
    spec = make_spec(stop={"early": False, "converged_within": 0.02, "remeasure": 0})
    assert spec.stop == StopSettings(early=False, converged_within=0.02, remeasure=0)
    assert CampaignSpec.from_mapping(spec.to_mapping()) == spec


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ({"early": "yes"}, r"stop\.early: 'yes' is not true or false"),
        ({"converged_within": 2}, r"stop\.converged_within: 2 is not a share between 0 and 1"),
        ({"converged_within": 0}, r"stop\.converged_within: 0 is not a share"),
        ({"converged_within": True}, r"stop\.converged_within: True is not a share"),
        ({"remeasure": -1}, r"stop\.remeasure: -1 is not a whole number of at least 0"),
        ({"remeasure": 21}, r"stop\.remeasure: 21 is more than 20"),
        ({"earlier": True}, r"unknown setting 'earlier' \(did you mean 'early'\?\)"),
        ([], "stop is \\[\\], not a mapping"),
    ],
)
def test_an_invalid_setting_is_refused_by_its_name(stop: Any, words: str) -> None:
    with pytest.raises(CampaignInvalidError, match=words):
        make_spec(stop=stop)


def test_convergence_without_a_guided_search_is_warned_of() -> None:
    spec = make_spec(stop={"converged_within": 0.02}, strategy="random")
    (warning,) = spec.warnings
    assert warning.startswith("stop.converged_within has no effect with strategy random:")
    assert CampaignSpec.from_mapping(spec.to_mapping()) == spec, "it is said once"
    assert make_spec(strategy="random").warnings == ()


def test_convergence_with_a_guided_search_is_not_warned_of() -> None:
    for objective in ("tokens_per_s", ["tokens_per_s", "memory_headroom"]):
        spec = make_spec(strategy="guided", objective=objective, stop={"converged_within": 0.02})
        assert spec.warnings == ()
