"""`layout-tuner webhook` says in one line what it refuses, against a real service."""

from __future__ import annotations

import pytest

from tests.kit.api import Command


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("https://a.test/" + "x" * 2000,), "address: String should have at most 2000 characters"),
        (("https://a.test/",), "is not a host that an administrator allows"),
    ],
)
def test_a_bad_webhook_is_refused_in_one_line(
    run: Command, given: tuple[str, ...], said: str
) -> None:
    refused = run("webhook", "add", "--event", "campaign.ended", *given)
    (line,) = refused.stderr.splitlines()
    assert said in line
    assert (refused.exit_code, refused.stdout) == (2, "")
