"""`layout-tuner owner` and `group`, and tokens of owners, against a real service."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result

from tests.kit.api import Command, ends, refused_line
from tests.kit.services import ServeProcess


def row_of(result: Result, name: str) -> list[str]:
    """The words after a name in the table that a command has printed."""
    rows = [line.split() for line in ends(result, 0).stdout.splitlines()]
    (found,) = [row[1:] for row in rows if row[0] == name]
    return found


@pytest.fixture(scope="module")
def tokens(run: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the tokens of ann, who is in the group `lab`, and of bob, in `site`."""
    folder = tmp_path_factory.mktemp("tokens")
    for name in ("ann", "bob"):
        options = ("--role", "submitter", "--owner", name, "--out", folder / name)
        made = run("token", "create", f"{name}-pc", *options)
        ends(made, 0, f"of {name}-pc: submitter, for {name}")
    assert row_of(run("owner", "set", "bob", "--weight", "2.5"), "bob") == ["2.5"]
    ends(run("group", "set", "lab", "--member", "ann"), 0)
    ends(run("group", "set", "site", "--member", "bob"), 0)
    return folder


@pytest.mark.usefixtures("tokens")
def test_tokens_are_listed_with_owner_and_role(run: Command) -> None:
    (row,) = [line for line in run("token", "list").stdout.splitlines() if " ann-pc " in line]
    assert row.split()[1:4] == ["ann-pc", "ann", "submitter"]


@pytest.mark.usefixtures("tokens")
def test_owners_are_listed_with_weight_and_groups(run: Command) -> None:
    owners = json.loads(run("owner", "list", "--json").stdout)["owners"]
    bob = {"name": "bob", "weight": 2.5, "subject": None, "groups": ["site"]}
    assert [each for each in owners if each["name"] == "bob"] == [bob]
    assert row_of(run("owner", "list"), "ann") == ["1", "lab"]


@pytest.mark.usefixtures("tokens")
def test_groups_are_listed_with_their_members(run: Command) -> None:
    groups = json.loads(run("group", "list", "--json").stdout)["groups"]
    members = {each["name"]: each["members"] for each in groups}
    assert (members["lab"], members["site"]) == (["ann"], ["bob"])


def test_a_member_sees_its_own_groups(run: Command, service: ServeProcess, tokens: Path) -> None:
    of_ann = ("--url", service.service["url"], "--token-file", tokens / "ann")
    assert run("whoami", *of_ann).stdout == "ann-pc: submitter, for ann, in lab\n"
    listed = run("group", "list", *of_ann).stdout
    assert "lab" in listed
    assert "site" not in listed


def test_a_submitter_does_not_list_owners(
    run: Command, service: ServeProcess, tokens: Path
) -> None:
    of_ann = ("--url", service.service["url"], "--token-file", tokens / "ann")
    ends(run("owner", "list", *of_ann), 1, "list_owners takes admin")


def test_a_group_keeps_what_a_change_does_not_name(run: Command) -> None:
    for name in ("dan", "eve"):
        ends(run("owner", "set", name, "--weight", "1"), 0)

    def crew(*options: str) -> list[str]:
        return row_of(run("group", "set", "crew", *options), "crew")

    assert crew() == ["1"]
    assert crew("--weight", "4", "--member", "eve", "--member", "dan") == ["4", "dan,", "eve"]
    assert crew("--weight", "3") == ["3", "dan,", "eve"]
    assert crew("--remove", "eve") == ["3", "dan"]
    assert crew("--remove", "dan") == ["3"]
    assert crew("--add", "eve", "--add", "dan") == ["3", "dan,", "eve"]
    changed = json.loads(run("group", "set", "crew", "--member", "eve", "--json").stdout)
    assert changed == {"name": "crew", "weight": 3.0, "members": ["eve"]}


def test_a_group_is_deleted_once(run: Command) -> None:
    run("group", "set", "brief")
    assert run("group", "delete", "brief").stdout == "the group brief is deleted\n"
    assert "there is no group 'brief'" in refused_line(run("group", "delete", "brief"))


def test_an_owner_gets_a_subject_and_is_signed_out(run: Command) -> None:
    subject = "https://sso.example.org#248289761001"
    for given, kept in ((subject, subject), ("", None)):
        said = run("owner", "set", "kim", "--subject", given, "--json")
        assert json.loads(ends(said, 0).stdout)["subject"] == kept
    ends(run("owner", "set", "kim", "--subject", "kim"), 2, "is not the issuer's address, a #")
    ends(run("owner", "sign-out", "kim"), 0, "0 sessions ended")
    ends(run("owner", "sign-out", "nobody"), 1, "there is no owner 'nobody'")


def test_nobody_joins_where_one_name_is_wrong(run: Command) -> None:
    run("owner", "set", "cid", "--weight", "1")
    run("group", "set", "odd")
    for call, code, said in (
        (("group", "set", "odd", "--add", "cid", "--add", "sid"), 1, "there is no owner 'sid'"),
        (("group", "set", "old", "--add", "cid"), 1, "there is no group 'old'"),
        (("group", "set", "odd", "--member", "cid", "--member", "x,y"), 1, "no owner 'x,y'"),
        (("group", "set", "odd", "--remove", "cid"), 1, "'cid' is not in the group 'odd'"),
        (("group", "set", "odd", "--weight", "0"), 2, "weight=0.0 is not from 0.001 to 1000"),
        (("owner", "set", "cid", "--weight", "1e9"), 2, "weight=1000000000.0 is not from 0.001"),
        (("owner", "set", "a b", "--weight", "1"), 2, "owner='a b' is not 1 to 64 characters"),
    ):
        refused = ends(run(*call), code, said)
        assert (refused.stdout, len(refused.stderr.splitlines())) == ("", 1)
    (odd,) = [
        each
        for each in json.loads(run("group", "list", "--json").stdout)["groups"]
        if each["name"] == "odd"
    ]
    assert odd == {"name": "odd", "weight": 1.0, "members": []}
