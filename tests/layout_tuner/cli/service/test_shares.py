"""`layout-tuner shares` and `quota`, against a real service."""

from __future__ import annotations

import json

import pytest

from tests.kit.api import Command, ends


def test_a_quota_is_set_listed_and_removed(run: Command) -> None:
    named = ("owner", "*", "--per", "month")
    options = ("--node-hours", "120", "--beyond", "wait", "--until", "2099-01-31")
    made = ends(run("quota", "set", *named, *options), 0)
    heads, _, row = made.stdout.splitlines()
    assert heads.split()[:3] == ["kind", "name", "period"]
    assert row.split() == ["owner", "*", "month", "120", "wait", "2099-01-31", "00:00"]
    assert run("quota", "list").stdout == made.stdout
    (listed,) = json.loads(run("quota", "list", "--json").stdout)["quotas"]
    assert (listed["node_hours"], listed["until"]) == (120.0, "2099-01-31T00:00:00Z")
    removed = ends(run("quota", "remove", *named), 0)
    assert removed.stdout == "the owner * has no quota for a month\n"
    ends(run("quota", "remove", *named), 1, "has no quota for a month; `layout-tuner quota list`")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("nobody", ("--node-hours", "1"), "there is no owner 'nobody'"),
        ("*", ("--node-hours", "0"), "node_hours=0 is not above 0"),
        ("*", ("--node-hours", "1e9"), "at most 1e+08"),
        ("*", ("--node-hours", "1", "--until", "2020-01-01"), "is past; leave it out"),
        ("*", ("--node-hours", "1", "--until", "9999-12-31"), "between the years 1970 and 9000"),
    ],
)
def test_a_bad_quota_is_refused(
    run: Command, name: str, options: tuple[str, ...], said: str
) -> None:
    refused = run("quota", "set", "owner", name, "--per", "day", *options)
    (line,) = refused.stderr.splitlines()
    assert said in line
    assert refused.exit_code > 0
    quotas = json.loads(run("quota", "list", "--json").stdout)["quotas"]
    assert [each for each in quotas if each["period"] == "day"] == []


def test_shares_are_listed(run: Command) -> None:
    header, _, *rows = (line.split() for line in run("shares").stdout.splitlines())
    assert header[:3] == ["cluster", "owner", "weight"]
    shares = json.loads(run("shares", "--json").stdout)["shares"]
    assert [row[:2] for row in rows] == [[each["cluster"], each["owner"]] for each in shares]


@pytest.mark.parametrize("value", ["0.99", "3651", "soon"])
def test_a_half_life_out_of_range_is_refused(run: Command, value: str) -> None:
    ends(run("serve", "--share-half-life", value), 2)
