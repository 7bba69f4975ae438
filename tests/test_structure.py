"""The checks of the code's structure find what they look for, and nothing in the code as it is."""

from __future__ import annotations

import pytest

from tests.structure import document_reads, opened_campaigns


@pytest.mark.parametrize(
    "line",
    [
        'budget = campaign.spec["budget"]',
        'budget = campaign.spec.get("budget", {})',
        'budget = spec["budget"]',
        'document = campaign.spec\nbudget = document["budget"]',
        'document = dict(campaign.spec)\nbudget = document.pop("budget")',
        'budget = (document := campaign.spec).get("budget")',
        'budget = campaign.stored.document["budget"]',
        'has_budget = "budget" in campaign.spec',
        "spec = CampaignSpec.from_mapping(campaign.spec)",
    ],
)
def test_a_look_into_the_document_of_a_campaign_is_found(line: str) -> None:
    assert document_reads(f"before = 1\n{line}\n")


@pytest.mark.parametrize(
    "line",
    [
        "budget = campaign.stored.budget",
        "budget = spec.budget",
        'document = {**campaign.spec, "name": name}',
        "text = write_yaml(dict(campaign.spec))",
        'value = other["spec"]',
        "space = SearchSpace.from_mapping(described)",
    ],
)
def test_what_shows_or_reads_a_campaign_otherwise_is_not(line: str) -> None:
    assert not document_reads(line)


def test_no_module_but_the_reader_looks_into_the_document_of_a_campaign() -> None:
    assert list(opened_campaigns()) == []
