"""A service with campaigns of several owners, and what each of its readers may see of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from fastapi.routing import iter_route_contexts
from starlette.routing import Mount

from layout_tuner.api.app import create_app
from layout_tuner.api.settings import Settings
from layout_tuner.protocol.worker_messages import BeatBody, NodeBody, NodeStatusBody, StatusBody
from layout_tuner.results_db.actor import Actor, TokenRole
from layout_tuner.results_db.campaigns.plans import PlanOptions
from layout_tuner.results_db.records import Visibility
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import CAMPAIGN, MODEL, TOKEN, answered, bearer
from tests.kit.store import (
    TimelyStore,
    TurnableClock,
    completed,
    failed,
    lease_one,
    make_spec,
    make_worker,
    run_trial,
    send_beats,
)

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

OWNERS: Final = ("ann", "bob", "cid")
GROUPS: Final = ("lab", "site")
ROLES: Final[tuple[TokenRole, ...]] = ("viewer", "submitter")
SECRET: Final = re.compile(r"(?:name|model|notes|log|why)-\d+-zq")
NUMBERED: Final = re.compile(
    r'(/campaigns/|/trials/|"campaign_id": ?|"trial_id": ?|[?&]trial_id=)(\d+)'
)
"""Ids of campaigns and trials in links and documents."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A campaign to be made; `group` counts only where its owner is in it."""

    owner: str
    visibility: Visibility
    group: str = "lab"
    has_ended: bool = False
    starts_from_own: bool = False
    """Whether it starts from the last campaign that its owner submitted before."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """A campaign that was made."""

    number: int
    drawn: Drawn
    id: int
    trials: Sequence[int]
    source: str = ""
    """The name of the campaign that it starts from."""

    @property
    def name(self) -> str:
        return f"name-{self.number}-zq"

    def is_seen_by(self, owner: str, groups: Set[str]) -> bool:
        """The rule of who sees a campaign, once more."""
        if self.drawn.visibility == "group":
            return owner == self.drawn.owner or self.drawn.group in groups
        return self.drawn.visibility == "everyone" or owner == self.drawn.owner


@dataclass(kw_only=True)
class World:
    """The service, its tokens and its campaigns."""

    http: TestClient
    store: Store
    groups: Mapping[str, Set[str]]
    """Of each owner."""
    tokens: dict[tuple[str, str], str] = field(default_factory=dict)
    """By owner and role."""
    made: list[Made] = field(default_factory=list)
    plans: dict[str, int] = field(default_factory=dict)
    worker: str = ""

    def seen_by(self, owner: str) -> list[Made]:
        return [each for each in self.made if each.is_seen_by(owner, self.groups[owner])]

    def hidden_from(self, owner: str) -> list[Made]:
        return [each for each in self.made if each not in self.seen_by(owner)]

    def ask(self, owner: str, role: str, method: str, path: str, **sent: Any) -> Any:
        headers = bearer(self.tokens[owner, role]) | sent.pop("headers", {})
        return self.http.request(method, path, headers=headers, follow_redirects=False, **sent)

    def paths(self, path: str, campaigns: Sequence[object], trials: Sequence[int]) -> list[str]:
        """A route's paths with each of these campaigns, by name or id, or of these trials."""
        values: dict[str, Sequence[object]] = {
            "campaign": campaigns,
            "trial_id": trials,
            "worker_id": [self.worker],
            "allocation_id": [self.worker],
            "plan_id": list(self.plans.values()),
            "name": ["history", "timeline", "tiny", "embedded", "local-cpu"],
            "file": ["job.yaml", "all.zip"],
            "cluster": ["local-cpu"],
            "node": ["n0"],
            "token_id": [1],
            "digest": ["x"],
        }
        found = [path]
        for name in re.findall(r"\{([^}]+)\}", path):
            found = [
                each.replace(f"{{{name}}}", str(value)) for each in found for value in values[name]
            ]
        return found

    def routes(self) -> list[tuple[str, str, str]]:
        """Method, path and name of every route of the application."""
        return [
            (method, str(route.path), str(route.name))
            for route in iter_route_contexts(self.http.app.routes)  # type: ignore[attr-defined]
            if not isinstance(route.original_route, Mount)
            for method in sorted(route.methods or ())
        ]


@contextmanager
def owners_world(
    database_url: str, client: Any, groups: Mapping[str, Set[str]], campaigns: Sequence[Drawn]
) -> Iterator[World]:
    """Makes the campaigns in a database of its own; streams end at once."""
    patience = {"event_stream_s": 0.05, "sweep_interval_s": 3600.0, "live_event_s": 0.01}
    settings = Settings(token=TOKEN, requests_per_s=1e6, **patience)
    with (
        closing(TimelyStore(database_url, clock=TurnableClock())) as store,
        client(create_app(settings, store), raise_server_exceptions=False) as http,
    ):
        for group in GROUPS:
            store.owners.put_group(
                group, members=[o for o in OWNERS if group in groups[o]], known_members=False
            )
        world = World(http=http, store=store, groups=groups)
        for owner in OWNERS:
            for role in ROLES:
                _, token = store.access.create_token(f"{owner}-{role}", role, owner=owner)
                world.tokens[owner, role] = token
        world.tokens["root", "admin"] = store.access.create_token("root", "admin")[1]
        world.tokens["crew", "worker"] = store.access.create_token("crew", "worker")[1]
        world.worker = make_worker(
            store, devices_per_node=4, nodes=[NodeBody(name="n0", num_devices=4)]
        ).id
        for number, drawn in enumerate(campaigns):
            world.made.append(_make(world, number, drawn))
        for each in world.made:
            if not each.drawn.has_ended:
                store.trials.add(each.id, Layout(num_microbatches=2))
        running = [each for each in world.made if not each.drawn.has_ended]
        doing = ", ".join(f"trial 3 of {each.name} (spans 2 of a, 1 of b)" for each in running)
        node = NodeStatusBody(name="n0", state="busy", doing=doing)
        beats = [
            BeatBody(trial_id=each.trials[-1], attempt=1, iterations_done=1) for each in running
        ]
        send_beats(store, world.worker, beats, status=StatusBody(nodes=[node]))
        for owner in OWNERS:
            own = store.by(Actor(name=owner, role="submitter"))
            world.plans[owner] = own.plans.request(make_spec("planned"), PlanOptions()).id
        yield world


def _make(world: World, number: int, drawn: Drawn) -> Made:
    store, name = world.store, f"name-{number}-zq"
    own = [each.name for each in world.made if each.drawn.owner == drawn.owner]
    sources = own[-1:] if drawn.starts_from_own else []
    document = {
        **CAMPAIGN,
        "name": name,
        "model": {**MODEL, "name": f"model-{number}-zq"},
        "start_from": sources,
    }
    if drawn.group not in world.groups[drawn.owner]:
        others = sorted(world.groups[drawn.owner])
        visibility = "private" if drawn.visibility == "group" and not others else drawn.visibility
        drawn = replace(drawn, visibility=visibility, group=others[0] if others else "")
    query = {"visibility": drawn.visibility} | ({"group": drawn.group} if drawn.group else {})
    made = world.ask(drawn.owner, "submitter", "POST", "/v1/campaigns", json=document, params=query)
    id_ = answered(made, 201).json()["id"]
    notes = {"notes": f"notes-{number}-zq"}
    answered(world.ask(drawn.owner, "submitter", "PATCH", f"/v1/campaigns/{id_}", json=notes), 200)
    model = store.campaigns.get(id_).stored.model
    layout = Layout(num_microbatches=8)
    wrong = failed("crashed", message=f"why-{number}-zq", log_tail=f"log-{number}-zq")
    trials = [
        run_trial(store, id_, layout, completed(layout, model=model)),
        run_trial(store, id_, Layout(tp=2, num_microbatches=8), wrong),
    ]
    if drawn.has_ended:
        store.campaigns.cancel(id_)
    else:
        running = store.trials.add(id_, Layout(pp=2, num_microbatches=8)).id
        assert lease_one(store, world.worker).trial_id == running
        trials.append(running)
    return Made(number=number, drawn=drawn, id=id_, trials=trials, source="".join(sources))
