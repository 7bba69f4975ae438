"""What an owner may not see is in no answer, and what it may see is there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy import event

from layout_tuner.results_db.records import VISIBILITIES
from tests.kit.owners_world import GROUPS, NUMBERED, OWNERS, ROLES, SECRET, Drawn, Made, World
from tests.kit.owners_world import owners_world as made_world
from tests.kit.postgres import upgraded
from tests.kit.service_fixtures import TestClient

MEMBERS: Final = {"ann": {"lab"}, "bob": {"lab", "site"}, "cid": set[str]()}
CAMPAIGNS: Final = [
    Drawn(owner="ann", visibility="private", has_ended=True),
    Drawn(owner="ann", visibility="group", starts_from_own=True),
    Drawn(owner="ann", visibility="everyone", starts_from_own=True),
    Drawn(owner="bob", visibility="private"),
    Drawn(owner="cid", visibility="everyone", has_ended=True),
]

drawn_campaigns = st.lists(
    st.builds(
        Drawn,
        owner=st.sampled_from(OWNERS),
        visibility=st.sampled_from(VISIBILITIES),
        group=st.sampled_from(GROUPS),
        has_ended=st.booleans(),
        starts_from_own=st.booleans(),
    ),
    min_size=2,
    max_size=4,
)
drawn_groups = st.fixed_dictionaries({owner: st.sets(st.sampled_from(GROUPS)) for owner in OWNERS})

drawn_readers = st.tuples(
    st.sampled_from(OWNERS), st.sampled_from(ROLES), st.sampled_from(["name", "id"])
)


ON_BOTH: Final = ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)]


@contextmanager
def database(kind: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of an empty database of this kind."""
    if kind == "sqlite":
        with TemporaryDirectory() as path:
            yield upgraded(Path(path)).database_url
    else:
        with request.getfixturevalue("empty_databases").lend() as url:
            yield url


@pytest.fixture(scope="module", params=ON_BOTH)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with (
        database(request.param, request) as url,
        made_world(url, TestClient, MEMBERS, CAMPAIGNS) as world,
    ):
        yield world


def readings(world: World, seen: list[Made], *, by: str) -> Iterator[str]:
    """Every address that can be read, of visible campaigns, and those with a query of interest."""
    ids = [id_ for each in seen for id_ in each.trials]
    for method, path, _ in world.routes():
        if method == "GET":
            yield from world.paths(path, [getattr(each, by) for each in seen], ids)
    yield from ("/v1/events?after=0", "/?name_contains=zq", "/v1/campaigns?name_contains=zq")
    yield from ("/v1/allocations?all=true", "/allocations?all=1", "/v1/nodes?cluster=local-cpu")
    for each in seen:
        yield f"/v1/campaigns/{each.id}/events?after=0"
        yield f"/v1/campaigns/{each.id}/exports?format=embedded"
        yield f"/submit?campaign={each.id}&view=yaml"
    for first, second in pairwise(ids):
        yield f"/compare?trial={first}&trial={second}"
    if len(seen) > 1:
        yield f"/compare-campaigns?campaign={seen[0].id}&campaign={seen[1].id}"


def secrets_of(made: list[Made]) -> Set[str]:
    kinds = ("name", "model", "notes", "log", "why")
    return {f"{kind}-{each.number}-zq" for each in made for kind in kinds}


def refuse_leaks(answer: Any, hidden: list[Made], asked: str) -> None:
    """Fails where an answer has a text or an id of what is hidden."""
    text = answer.content.decode(errors="replace")
    assert not (found := set(SECRET.findall(text)) & secrets_of(hidden)), (asked, found)
    ids = {"/campaigns/": {each.id for each in hidden}}
    ids["/trials/"] = {id_ for each in hidden for id_ in each.trials}
    for kind, number in NUMBERED.findall(text):
        table = "/campaigns/" if "campaign" in kind else "/trials/"
        assert int(number) not in ids[table], (asked, kind, number)


def check(world: World, owner: str, role: str, *, by: str) -> None:
    """One reader asks for everything."""
    seen, hidden = world.seen_by(owner), world.hidden_from(owner)
    there: set[str] = set()
    for asked in readings(world, seen, by=by):
        answer = world.ask(owner, role, "GET", asked)
        assert answer.status_code < 500, (asked, answer.text)
        refuse_leaks(answer, hidden, asked)
        there |= set(SECRET.findall(answer.content.decode(errors="replace")))
    assert there == secrets_of(seen)
    listed = world.ask(owner, role, "GET", "/v1/campaigns").json()["campaigns"]
    assert {each["id"] for each in listed} == {each.id for each in seen}
    for each in seen:
        known = [
            other
            for other in seen
            if other in world.seen_by(each.drawn.owner)
            and other is not each
            and (other.drawn.has_ended or other.name == each.source)
        ]
        detail = world.ask(owner, role, "GET", f"/v1/campaigns/{each.id}").json()
        assert detail["starts_from"] == NUM_ENDED * len(known)
    page = world.ask(owner, role, "GET", "/").text
    assert (f"of {len(seen)} campaigns" if seen else "No campaigns.") in page
    choices = re.findall(r"\((\d+)\)</option>", page)  # of state, owner, visibility, model, cluster
    assert sum(map(int, choices)) == 5 * len(seen)
    for of, plan_id in world.plans.items():
        answer = world.ask(owner, role, "GET", f"/v1/plans/{plan_id}")
        assert answer.status_code == (200 if of == owner else 404), of
    metrics = world.ask(owner, role, "GET", "/metrics").text
    counts = re.findall(r"layout_tuner_campaigns\{[^}]*\} (\d+)", metrics)
    assert sum(map(int, counts)) == len(seen)
    ends = re.findall(r'layout_tuner_open_trials\{state="(\w+)"\} (\d+)', metrics)
    num_open = sum(not each.drawn.has_ended for each in seen)
    assert dict(ends) == {"PENDING": str(num_open), "RUNNING": str(num_open)}
    (allocation,) = world.ask(owner, role, "GET", "/v1/allocations").json()["allocations"]
    assert (len(allocation["running"]), allocation["num_not_leased"]) == (num_open, num_open)
    others_run = any(not each.drawn.has_ended for each in hidden)
    doing = allocation["nodes"][0]["doing"]
    assert ("another owner's probe" in doing) == others_run
    assert doing.count("trial 3 of") == num_open


NUM_ENDED: Final = 2
"""Trials of each campaign that ended."""
OF_OTHERS: Final = re.compile(r"(FROM|UPDATE) (tokens|browser_sign_ins)|WHERE events.seq IS NULL")
"""Statements of the book of tokens, and of the numbering of events in the background."""
OF_SOMETHING: Final = re.compile(r"\{(campaign|trial_id)\}")
ABSENT: Final = {"name": "name-99-zq", "id": 987_654}


def pairs(world: World, hidden: list[Made]) -> Iterator[tuple[str, str, str]]:
    """Method and paths of every request for something hidden, and for what never was."""
    for method, path, _ in world.routes():
        for each in hidden if OF_SOMETHING.search(path) else ():
            for by in ("name", "id"):
                trial = each.trials[0]
                asked = world.paths(path, [getattr(each, by)], [trial])
                never = world.paths(path, [ABSENT[by]], [ABSENT["id"]])
                for one, other in zip(asked, never, strict=True):
                    yield method, one, other


def plain(text: str, hidden: list[Made]) -> str:
    """An answer without what the request itself named."""
    names = [ABSENT["name"], *(each.name for each in hidden)]
    ids = [ABSENT["id"], *(id_ for each in hidden for id_ in (each.id, *each.trials))]
    for word in (*names, *ids):
        text = re.sub(rf"\b{word}\b", "IT", text)
    return text


@pytest.mark.parametrize("role", ROLES)
def test_what_is_hidden_is_answered_as_what_never_was(world: World, role: str) -> None:
    hidden = world.hidden_from("cid")[:2]
    for method, asked, never in pairs(world, hidden):
        one, other = (
            world.ask("cid", role, method, path, headers={"If-None-Match": "*"})
            for path in (asked, never)
        )
        assert one.status_code == other.status_code, (method, asked)
        assert one.headers.keys() == other.headers.keys(), (method, asked)
        assert one.status_code in (403, 404, 422), (method, asked, one.text)
        assert plain(one.text, hidden) == plain(other.text, hidden), (method, asked)


def test_hidden_and_absent_take_the_same_queries(world: World) -> None:
    said: list[str] = []
    engine = world.store._db.engine
    event.listen(engine, "before_cursor_execute", lambda *args: said.append(args[2]))

    def queries(method: str, path: str) -> list[str]:
        world.ask("cid", "submitter", method, path)
        found = [each for each in said if not OF_OTHERS.search(each)]
        said.clear()
        return found

    asked_any = 0
    for method, asked, never in pairs(world, world.hidden_from("cid")[:1]):
        found = queries(method, asked)
        assert found == queries(method, never), (method, asked)
        asked_any += bool(found)
    assert asked_any > 50


@pytest.mark.parametrize(
    ("owner", "role"),
    [pytest.param("bob", "viewer", marks=pytest.mark.slow), ("cid", "submitter")],
)
def test_nothing_of_what_is_hidden_is_in_any_answer(world: World, owner: str, role: str) -> None:
    check(world, owner, role, by="name")


def test_administrators_see_all_and_workers_nothing(world: World) -> None:
    text = "".join(
        world.ask("root", "admin", "GET", path).text
        for path in ("/", "/v1/campaigns", "/v1/events?after=0", "/allocations")
    )
    assert {f"name-{each.number}-zq" for each in world.made} <= set(SECRET.findall(text))
    for asked in readings(world, world.made, by="id"):
        answer = world.ask("crew", "worker", "GET", asked)
        refuse_leaks(answer, world.made, asked)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("sqlite", marks=pytest.mark.slow),
        pytest.param("postgresql", marks=pytest.mark.nightly),
    ],
)
@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # to shrink an example takes an hour
)
@given(groups=drawn_groups, campaigns=drawn_campaigns, reader=drawn_readers)
def test_nobody_sees_what_is_hidden_whoever_owns_it(
    request: pytest.FixtureRequest,
    kind: str,
    groups: dict[str, set[str]],
    campaigns: list[Drawn],
    reader: tuple[str, str, str],
) -> None:
    with (
        database(kind, request) as url,
        made_world(url, TestClient, groups, campaigns) as world,
    ):
        owner, role, by = reader
        check(world, owner, role, by=by)
