"""Commands that find, change, clone, delete and report campaigns, against a real service."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result

from results_db.store import Store
from search_spaces.spec.layout import Layout
from tests.kit.api import CAMPAIGN, Command
from tests.kit.page import Page
from tests.kit.services import ServeProcess
from tests.kit.store import completed, failed, lease_one, make_worker, post_outcome

LAYOUT = Layout(num_microbatches=8)


@pytest.fixture
def name(request: pytest.FixtureRequest, service: ServeProcess) -> str:
    """A campaign of the test's own."""
    test = re.sub(r"[^a-z_0-9]+", "-", str(request.node.name).removeprefix("test_").lower())
    name = test[-60:].strip("_-")
    service.post("/campaigns", {**CAMPAIGN, "name": name})
    return name


def done(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.output


def test_a_list_of_campaigns_is_filtered(run: Command, name: str) -> None:
    shown = done(run("campaign", "list", "--name-contains", name.upper(), "--state", "running"))
    assert name in shown
    assert name not in done(run("campaign", "list", "--state", "PAUSED"))
    assert name not in done(run("campaign", "list", "--created-before", "2020-01-01"))
    assert name in done(run("campaign", "list", "--created-after", "2020-01-01T00:00+02:00"))
    found = json.loads(
        done(run("campaign", "list", "--strategy", "random", "--limit", "1", "--json"))
    )
    assert len(found["campaigns"]) == 1


def test_an_invalid_time_is_bad_usage(run: Command) -> None:
    refused = run("campaign", "list", "--created-after", "yesterday")
    assert refused.exit_code == 2
    assert "'yesterday' is not a time" in refused.output


def test_an_update_changes_what_it_names(run: Command, name: str, tmp_path: Path) -> None:
    told = done(run("campaign", "update", name, "--trials", "9", "--wall-time", "1h"))
    assert told == f"campaign {name}: at most 9 trials or 1 h 00 min\n"
    notes = tmp_path / "notes.txt"
    notes.write_text("first line\nsecond line\n")
    done(run("campaign", "update", name, "--no-wall-time", "--notes-file", str(notes)))
    shown = done(run("campaign", "show", name))
    assert "at most 9 trials\n" in shown
    assert "notes         first line\n              second line\n" in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "nothing is to be changed"),
        (("--trials", "3", "--no-trials"), "exclude each other"),
        (("--notes", "x", "--notes-file", __file__), "exclude each other"),
    ],
)
def test_an_invalid_update_is_bad_usage(
    run: Command, arguments: tuple[str, ...], says: str
) -> None:
    refused = run("campaign", "update", "any", *arguments)
    assert refused.exit_code == 2
    assert says in refused.output


def test_an_update_of_an_ended_campaign_names_the_clone(run: Command, name: str) -> None:
    done(run("campaign", "cancel", name))
    refused = run("campaign", "update", name, "--trials", "9")
    assert refused.exit_code == 1
    assert "layout-tuner campaign clone" in refused.output
    told = done(run("campaign", "clone", name, "--trials", "9"))
    assert told.startswith(
        f"campaign {name}-2 submitted: 4 legal layouts, precision fp32, at most 9 trials\n"
    )


def test_a_clone_has_the_values_that_set_states(run: Command, name: str) -> None:
    told = done(
        run(
            *("campaign", "clone", name, "--name", f"{name}-b", "--wall-time", "2h", "--json"),
            *("--set", "strategy=exhaustive", "--set", "space.tp=[1]", "--set", "space.pp=2"),
            *("--set", "probe.iterations=3"),
        )
    )
    spec = json.loads(told)["spec"]
    assert (spec["strategy"], spec["space"]["tp"], spec["space"]["pp"]) == ("exhaustive", 1, 2)
    assert spec["space"]["global_batch_size"] == CAMPAIGN["space"]["global_batch_size"]
    assert spec["budget"] == {"trials": 5, "node_hours": None, "wall_time_s": 7200.0}
    assert spec["probe"]["iterations"] == 3


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("strategy", "write it as FIELD=VALUE"),
        ("seed.deep=3", "set the whole field"),
        ("seed=[1", "malformed YAML"),
    ],
)
def test_an_invalid_setting_is_bad_usage(run: Command, name: str, setting: str, says: str) -> None:
    refused = run("campaign", "clone", name, "--set", setting)
    assert refused.exit_code == 2
    assert says in refused.output


def test_a_span_is_set_in_either_spelling(run: Command, name: str) -> None:
    told = done(
        run(
            *("campaign", "clone", name, "--set", "budget.wall_time=2h"),
            *("--set", "probe.deadline=90s", "--json"),
        )
    )
    spec = json.loads(told)["spec"]
    assert spec["budget"]["wall_time_s"] == 7200.0
    assert spec["probe"]["deadline_s"] == 90.0


def test_a_bound_beside_an_invalid_budget_is_bad_usage(run: Command, name: str) -> None:
    refused = run("campaign", "clone", name, "--set", "budget=5", "--trials", "3")
    assert refused.exit_code == 2
    assert "budget.trials=40" in refused.output


def test_a_clone_that_the_service_refuses_is_a_failure(run: Command, name: str) -> None:
    refused = run("campaign", "clone", name, "--set", "colour=red")
    assert refused.exit_code == 1
    assert "colour" in refused.output


def test_a_campaign_is_deleted_after_confirmation(run: Command, name: str, store: Store) -> None:
    store.trials.add(store.campaigns.by_name(name).id, LAYOUT)
    assert run("campaign", "delete", name, answer="n\n").exit_code == 1
    refused = run("campaign", "delete", name, "--yes")
    assert refused.exit_code == 1
    assert "cancel it before" in refused.output
    told = done(run("campaign", "delete", name, "--cancel", answer="y\n"))
    assert f"campaign {name} deleted, with 1 trial" in told
    assert run("campaign", "show", name).exit_code == 1


def test_deletion_waits_for_the_worker_that_stops_a_trial(
    run: Command, name: str, store: Store
) -> None:
    found = store.campaigns.by_name(name)
    worker = make_worker(store, name, devices_per_node=4)
    trial = store.trials.add(found.id, LAYOUT)
    lease = lease_one(store, worker.id)
    results: list[Result] = []
    waiting = threading.Thread(
        target=lambda: results.append(run("campaign", "delete", name, "--cancel", "--yes"))
    )
    waiting.start()
    cancelled = threading.Event()
    for _ in range(600):
        if store.campaigns.get(found.id).state == "CANCELLED":
            cancelled.set()
            break
        cancelled.wait(0.1)
    assert cancelled.is_set()
    assert results == []
    post_outcome(store, trial.id, lease.attempt, failed("cancelled"))
    waiting.join(60)
    assert "deleted, with 1 trial" in done(results[0])


def test_a_report_is_written_to_a_file_or_printed(
    run: Command, name: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(store, name, devices_per_node=4)
    trial = store.trials.add(store.campaigns.by_name(name).id, LAYOUT)
    post_outcome(store, trial.id, lease_one(store, worker.id).attempt, completed(LAYOUT))
    monkeypatch.chdir(tmp_path)
    assert done(run("report", name)) == f"report of {name}: {name}.html\n"
    written = (tmp_path / f"{name}.html").read_text()
    assert Page(written).texts["h1"] == [name]
    assert "1,000 tokens/s" in Page(written).text
    refused = run("report", name)
    assert refused.exit_code == 1
    assert "--force" in refused.output
    done(run("report", name, "--force"))
    assert Page(done(run("report", name, "--out", "-"))).texts["h1"] == [name]
    assert run("report", name, "--out", "nowhere/a.html").exit_code == 1
    assert run("report", "nothing").exit_code == 1


def write(path: Path, document: Any) -> str:
    path.write_text(yaml.safe_dump(document))
    return str(path)


def test_a_model_is_put_listed_shown_and_deleted(run: Command, tmp_path: Path) -> None:
    file = write(tmp_path / "m.yaml", {"preset": "tiny", "num_layers": 6})
    assert "model six is stored" in done(run("model", "put", "six", file))
    assert "six" in done(run("model", "list"))
    shown = yaml.safe_load(done(run("model", "show", "six")))
    assert (shown["name"], shown["num_layers"]) == ("six", 6)
    assert json.loads(done(run("model", "show", "tiny", "--json")))["preset"] is True
    assert done(run("model", "delete", "six")) == "model six deleted\n"
    refused = run("model", "delete", "tiny")
    assert refused.exit_code == 1
    assert "is a preset" in refused.output


def test_a_cluster_is_put_with_a_warning_and_shown_as_a_file(run: Command, tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", {"device": "X1", "devices_per_node": 2})
    told = run("cluster", "put", "desk", file)
    assert "cluster desk is stored" in done(told)
    assert "generic constants stand in for" in told.output
    assert "desk" in done(run("cluster", "list"))
    shown = tmp_path / "shown.yaml"
    shown.write_text(done(run("cluster", "show", "desk")))
    done(run("cluster", "put", "desk", str(shown)))
    done(run("cluster", "delete", "desk"))
    assert run("cluster", "show", "desk").exit_code == 1


def test_a_file_without_a_description_is_bad_usage(run: Command, tmp_path: Path) -> None:
    refused = run("model", "put", "mine", write(tmp_path / "m.yaml", [1, 2]))
    assert refused.exit_code == 2
    assert "the model is not a mapping" in refused.output
