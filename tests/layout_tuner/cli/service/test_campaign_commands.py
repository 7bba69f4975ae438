"""Commands of campaigns, models and clusters, and files of clusters, which every command reads."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from layout_tuner.cli.predictions.estimate import estimate
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import MODEL_PRESETS
from tests.kit.api import CAMPAIGN, Command, ends
from tests.kit.page import Page
from tests.kit.python_process import ROOT
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
    return ends(result, 0).output


def test_a_list_of_campaigns_is_filtered(run: Command, name: str) -> None:
    shown = done(run("campaign", "list", "--name-contains", name.upper(), "--state", "running"))
    assert name in shown
    assert name not in done(run("campaign", "list", "--state", "PAUSED"))
    assert name not in done(run("campaign", "list", "--created-before", "2020-01-01"))
    assert name in done(run("campaign", "list", "--created-after", "2020-01-01T00:00+02:00"))
    one = done(run("campaign", "list", "--strategy", "random", "--limit", "1", "--json"))
    assert len(json.loads(one)["campaigns"]) == 1


def test_who_sees_a_campaign_is_stated_and_changed(run: Command, tmp_path: Path) -> None:
    file = tmp_path / "shared.yaml"
    file.write_text(yaml.safe_dump({**CAMPAIGN, "name": "shared-by-command"}))
    done(run("campaign", "submit", str(file), "--visibility", "private", "--priority", "-2"))
    shown = done(run("campaign", "show", "shared-by-command"))
    assert "seen by       its owner; priority -2\n" in shown
    assert "shared-by-command" in done(run("campaign", "list", "--visibility", "private"))
    changed = run("campaign", "update", "shared-by-command", "--visibility", "everyone")
    assert "seen by everyone" in done(changed)
    assert "shared-by-command" not in done(run("campaign", "list", "--visibility", "private"))
    refused = run("campaign", "update", "shared-by-command", "--visibility", "group")
    ends(refused, 2, "in no group: ask an administrator")
    done(run("campaign", "clone", "shared-by-command", "--visibility", "private"))
    clone = json.loads(done(run("campaign", "show", "shared-by-command-2", "--json")))
    assert (clone["visibility"], clone["priority"]) == ("private", 0)


def test_the_model_of_a_campaign_is_shown_with_what_it_states_of_attention(
    run: Command, service: ServeProcess
) -> None:
    model = {"preset": "tiny", "attention": "fused", "name": "told"}
    service.post("/campaigns", {**CAMPAIGN, "name": "says-fused", "model": model})
    assert "model         told (attention=fused)\n" in done(run("campaign", "show", "says-fused"))


def test_an_update_changes_what_it_names_and_of_an_ended_campaign_names_the_clone(
    run: Command, name: str, tmp_path: Path
) -> None:
    told = done(run("campaign", "update", name, "--trials", "9", "--wall-time", "1h"))
    assert told == f"campaign {name}: at most 9 trials or 1 h 00 min, seen by everyone\n"
    notes = tmp_path / "notes.txt"
    notes.write_text("first line\nsecond line\n")
    done(run("campaign", "update", name, "--no-wall-time", "--notes-file", str(notes)))
    shown = done(run("campaign", "show", name))
    assert "at most 9 trials\n" in shown
    assert "notes         first line\n              second line\n" in shown

    done(run("campaign", "cancel", name))
    ends(run("campaign", "update", name, "--trials", "9"), 1, "layout-tuner campaign clone")
    told = done(run("campaign", "clone", name, "--trials", "9"))
    clone = f"campaign {name}-2 submitted: 4 legal layouts, precision fp32, at most 9 trials\n"
    assert told.startswith(clone)


def test_a_clone_has_the_values_that_set_states(run: Command, name: str) -> None:
    sets = ("strategy=exhaustive", "space.tp=[1]", "space.pp=2", "probe.iterations=3")
    words = [f"--set={each}" for each in (*sets, "probe.deadline=90s")]
    told = run("campaign", "clone", name, "--name", f"{name}-b", "--wall-time=2h", *words, "--json")
    spec = json.loads(done(told))["spec"]
    assert (spec["strategy"], spec["space"]["tp"], spec["space"]["pp"]) == ("exhaustive", 1, 2)
    assert spec["space"]["global_batch_size"] == CAMPAIGN["space"]["global_batch_size"]
    assert spec["budget"] == {"trials": 5, "node_hours": None, "wall_time_s": 7200.0}
    assert (spec["probe"]["iterations"], spec["probe"]["deadline_s"]) == (3, 90.0)
    told = done(run("campaign", "clone", name, "--set", "budget.wall_time=2h", "--json"))
    assert json.loads(told)["spec"]["budget"]["wall_time_s"] == 7200.0


def test_a_campaign_is_deleted_after_confirmation(run: Command, name: str, store: Store) -> None:
    store.trials.add(store.campaigns.by_name(name).id, LAYOUT)
    assert run("campaign", "delete", name, answer="n\n").exit_code == 1
    ends(run("campaign", "delete", name, "--yes"), 1, "cancel it before")
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
    ends(run("report", name), 1, "--force")
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
    file = write(tmp_path / "m.yaml", [1, 2])
    ends(run("model", "put", "mine", file), 2, "the model is [1, 2], not a mapping")


def test_listed_parameters_count_multi_token_prediction(run: Command) -> None:
    model = MODEL_PRESETS["deepseek-v3"]
    head, *lines = done(run("model", "list")).splitlines()
    assert head.endswith("parameters with MTP")
    (line,) = [each for each in lines if each.split()[0] == model.name]
    counted = model.num_main_parameters + model.num_mtp_layers * model.num_mtp_parameters
    assert line.split()[-1] == f"{counted:,}" != f"{model.num_main_parameters:,}"


def test_a_cluster_is_put_listed_shown_and_deleted(run: Command, tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", {"device": "X1", "devices_per_node": 2})
    told = run("cluster", "put", "desk", file)
    assert "cluster desk is stored" in done(told)
    assert "generic constants stand in for" in told.output
    listed = done(run("cluster", "list"))
    assert "desk" in listed
    assert "tray 4, domain 72, fabric" in listed
    shown = tmp_path / "shown.yaml"
    shown.write_text(done(run("cluster", "show", "desk")))
    done(run("cluster", "put", "desk", str(shown)))
    done(run("cluster", "delete", "desk"))
    assert run("cluster", "show", "desk").exit_code == 1


EXAMPLE = ROOT / "examples" / "our-cluster.yaml"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("lt_worker")
    file.chmod(0o600)
    return file


def put(run: Command, file: Path) -> Result:
    return run("cluster", "put", "our-cluster", file)


def estimated(run: Command, file: Path) -> Result:
    flags = ("--model=llama-8b", "--tp=4", "--dp=2", "--global-batch-size=64", "--zero-stage=1")
    return run("estimate", f"--cluster={file}", *flags, "--json")


def allocated(run: Command, file: Path, token_file: Path) -> Result:
    words = ("submit", "--nodes=2", "--time=1h", "--account=A", "--dry-run")
    place = ("--url=http://service.example.org:8080", f"--token-file={token_file}")
    place = (*place, f"--worker-token-file={token_file}")
    return run("allocation", *words, *place, f"--cluster={file}")


def test_the_example_of_a_cluster_file_can_be_put_and_campaigns_submitted_for_it(
    run: Command, tmp_path: Path
) -> None:
    made = ends(put(run, EXAMPLE), 0)
    assert "the section site" in made.stderr
    assert "warning" not in made.stderr
    shown = json.loads(run("cluster", "show", "our-cluster", "--json").stdout)["description"]
    assert (shown["num_nodes"], shown["devices_per_node"]) == (32, 4)
    assert "site" not in shown

    file = tmp_path / "campaign.yaml"
    space = {"global_batch_size": 64, "num_nodes": [2, 4], "tp": [2, 4], "zero_stage": 1}
    document = {**CAMPAIGN, "model": "llama-1b", "cluster": "our-cluster", "space": space}
    file.write_text(yaml.safe_dump(document))
    submitted = ends(run("campaign", "submit", file, "--json"), 0)
    assert json.loads(submitted.stdout)["spec"]["cluster"] == shown


def test_an_estimate_takes_the_example_of_a_cluster_file(run: Command) -> None:
    report = json.loads(ends(estimated(run, EXAMPLE), 0).stdout)
    assert (report["cluster"], report["num_nodes"]) == ("our-cluster", 2)
    assert report["precision"] == "bf16"


def test_an_allocation_takes_the_site_of_the_example_of_a_cluster_file(
    run: Command, token_file: Path
) -> None:
    rendered = ends(allocated(run, EXAMPLE, token_file), 0)
    assert "module load cuda/12.8" in rendered.stdout
    assert "#SBATCH --gres=gpu:4" in rendered.stdout


def test_every_command_refuses_the_same_mistakes_of_a_cluster_file_and_does_without_a_site(
    run: Command, token_file: Path, tmp_path: Path
) -> None:
    document = yaml.safe_load(EXAMPLE.read_text())
    file = tmp_path / "wrong.yaml"
    for changes, says in (
        ({"gpus": 4}, "unknown cluster field 'gpus'"),
        ({"site": {"preset": "fronteer"}}, "site: unknown site 'fronteer'"),
        ({"site": {"drain_s": 0}}, "site.drain_s: 0 is not a number over 0"),
    ):
        file.write_text(yaml.safe_dump({**document, **changes}))
        for refused in (put(run, file), estimated(run, file), allocated(run, file, token_file)):
            assert (refused.exit_code in (1, 2), refused.stdout) == (True, "")
            assert says in " ".join(refused.stderr.split()), refused.output

    file = tmp_path / "plain.json"
    del document["site"]
    file.write_text(json.dumps(document))
    assert put(run, file).stderr == ""
    assert estimated(run, file).exit_code == 0
    assert "nothing is known of our-cluster's site" in allocated(run, file, token_file).stderr


def test_a_cluster_of_the_service_is_known_by_its_name(
    run: Command, service: ServeProcess, token_file: Path, tmp_path: Path
) -> None:
    assert put(run, EXAMPLE).exit_code == 0
    flags = ("--model=llama-8b", "--tp=4", "--dp=2", "--num-microbatches=4", "--zero-stage=1")
    by_name = ends(run("estimate", "--cluster=our-cluster", *flags, "--json"), 0)
    by_file = json.loads(run("estimate", f"--cluster={EXAMPLE}", *flags, "--json").stdout)
    assert json.loads(by_name.stdout) == by_file

    smaller = tmp_path / "smaller.yaml"
    smaller.write_text("{preset: our-cluster, num_nodes: 1, device_memory_gb: 40}")
    shrunk = run("estimate", f"--cluster={smaller}", *flags[:2], flags[3], "--json").stdout
    assert json.loads(shrunk)["device_memory_bytes"] == 40 << 30

    probed = run("probe", "--cluster=our-cluster", "--model=tiny", "--tp=8", "--num-microbatches=1")
    assert (probed.exit_code, probed.stdout) == (2, "")
    assert "tp=8" in probed.stderr
    assert "unknown cluster" not in probed.stderr

    token_file.write_text((service.data_dir / "token").read_text())
    place = (f"--url={service.service['url']}", f"--token-file={token_file}")
    place = (*place, f"--worker-token-file={service.data_dir / 'worker-token'}")
    words = ("submit", "--nodes=2", "--time=1h", "--dry-run", "--cluster=our-cluster")
    rendered = ends(run("allocation", *words, *place), 0)
    assert '"num_nodes": 32' in rendered.stdout, "the job does not have to ask again"


def test_an_unknown_cluster_says_where_it_was_looked_for(
    run: Command, service: ServeProcess, tmp_path: Path
) -> None:
    assert put(run, EXAMPLE).exit_code == 0
    flags = ("--model=tiny", "--num-microbatches=1", "--cluster=our-clutser")
    looked = f"the service at {service.service['url']} has no cluster of that name"
    ends(run("estimate", *flags), 2, "did you mean 'our-cluster'", looked)
    nowhere = {"LAYOUT_TUNER_DATA_DIR": str(tmp_path / "none")}
    alone = CliRunner().invoke(estimate, flags, env=nowhere)
    ends(alone, 2, "no service was asked (no service runs on the data directory")
