"""Commands that find, change, clone, delete and report campaigns, against a real service."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
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
from tests.kit.store import completed, failed, lease_one, make_worker, post_outcome, run_trial
from tests.kit.waiting import wait_until

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


def test_an_update_changes_what_it_names(run: Command, name: str, tmp_path: Path) -> None:
    told = done(run("campaign", "update", name, "--trials", "9", "--wall-time", "1h"))
    assert told == f"campaign {name}: at most 9 trials or 1 h 00 min\n"
    notes = tmp_path / "notes.txt"
    notes.write_text("first line\nsecond line\n")
    done(run("campaign", "update", name, "--no-wall-time", "--notes-file", str(notes)))
    shown = done(run("campaign", "show", name))
    assert "at most 9 trials\n" in shown
    assert "notes         first line\n              second line\n" in shown


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
            *("--set", "probe.iterations=3", "--set", "probe.deadline=90s"),
        )
    )
    spec = json.loads(told)["spec"]
    assert (spec["strategy"], spec["space"]["tp"], spec["space"]["pp"]) == ("exhaustive", 1, 2)
    assert spec["space"]["global_batch_size"] == CAMPAIGN["space"]["global_batch_size"]
    assert spec["budget"] == {"trials": 5, "node_hours": None, "wall_time_s": 7200.0}
    assert (spec["probe"]["iterations"], spec["probe"]["deadline_s"]) == (3, 90.0)
    told = done(run("campaign", "clone", name, "--set", "budget.wall_time=2h", "--json"))
    assert json.loads(told)["spec"]["budget"]["wall_time_s"] == 7200.0


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
    with ThreadPoolExecutor(1) as pool:
        deleting = pool.submit(run, "campaign", "delete", name, "--cancel", "--yes")
        wait_until("it is cancelled", lambda: store.campaigns.get(found.id).state == "CANCELLED")
        assert not deleting.done()
        post_outcome(store, trial.id, lease.attempt, failed("cancelled"))
        assert "deleted, with 1 trial" in done(deleting.result(60))


def test_a_report_is_written_to_a_file_or_printed(
    run: Command, name: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(store, name, devices_per_node=4)
    run_trial(store, store.campaigns.by_name(name).id, LAYOUT, completed(LAYOUT), worker=worker.id)
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
    refused = run("model", "put", "mine", write(tmp_path / "m.yaml", [1, 2]))
    assert (refused.exit_code, "the model is not a mapping" in refused.output) == (2, True)


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
