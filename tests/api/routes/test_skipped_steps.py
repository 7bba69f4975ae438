"""Skipped steps that no log tells are unknown, from the outcome over HTTP to pages and tables."""

from __future__ import annotations

from typing import Any

from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import Api, Command, answered

THEIRS: dict[str, Any] = {"trainer": "theirs", "trainer_version": "1", "breakdown": None}
WORDS = {
    None: "not known: the trainer's log does not say whether steps were skipped",
    3: "3 steps were skipped: their gradients overflowed",
    0: "",
}


def test_skipped_steps_are_a_number_or_unknown_everywhere(api: Api, command: Command) -> None:
    api.submit(probe={"trainer": "theirs"})
    worker = api.register(trainers={"theirs": "1"})
    layouts = [Layout(**degree, num_microbatches=8) for degree in ({}, {"tp": 2}, {"pp": 2})]
    trials = {
        skipped: api.complete(worker, "first", layout, **THEIRS, skipped_steps=skipped)
        for skipped, layout in zip(WORDS, layouts, strict=True)
    }
    table = api.table("/campaigns/first/table")
    assert [row["skipped_steps"] for row in table] == ["", "3", "0"]
    for skipped, trial in trials.items():
        assert api.get(f"/trials/{trial}")["measurement"]["skipped_steps"] == skipped
        page = answered(api.http.get(f"/trials/{trial}", headers={"Accept": "text/html"}), 200).text
        for shown in (page.replace("&#39;", "'"), command("trial", "show", str(trial)).output):
            assert ("skipped steps" in shown) is bool(WORDS[skipped])
            assert WORDS[skipped] in shown
