"""The commands, against a real service over real HTTP."""

import itertools
import json
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
import yaml
from click.testing import CliRunner, Result

from layout_tuner.api.formatting import zero
from layout_tuner.cli.main import main
from layout_tuner.client.clients import Client
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.models.tables import Campaign
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.trainers.exports.export import FORMATS
from tests.kit.api import CAMPAIGN, ends
from tests.kit.services import ServeProcess
from tests.kit.store import TimelyStore, completed, make_worker, run_trial

ANYWHERE = Layout(dp=2, num_microbatches=4, precision="bf16")
"""A layout of a Llama that every trainer has."""
LAYOUTS = [Layout(tp=tp, pp=pp, num_microbatches=8) for tp in (1, 2) for pp in (1, 2)]
FASTER = [(layout, 1000.0 * number) for number, layout in enumerate(LAYOUTS, 1)]
"""Each is faster than the one before."""


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A campaign name of the test's own."""
    return str(request.node.name).removeprefix("test_")[:50]


def test_a_campaign_is_submitted_as_yaml_or_json_and_all_that_is_wrong_is_listed(
    run, tmp_path: Path, name: str
) -> None:
    as_yaml, as_json = tmp_path / "a.yaml", tmp_path / "a.json"
    as_yaml.write_text(yaml.safe_dump({**CAMPAIGN, "name": f"{name}.yaml"}))
    as_json.write_text(json.dumps({**CAMPAIGN, "name": f"{name}.json"}))
    done = ends(run("campaign", "submit", str(as_yaml)), 0)
    told = f"campaign {name}.yaml submitted: 4 legal layouts, precision fp32, at most 5 trials\n"
    assert done.stdout == told
    done = run("campaign", "submit", str(as_json), "--json")
    assert json.loads(done.stdout)["name"] == f"{name}.json"

    file = tmp_path / "c.yaml"
    wrong = {"model": {"preset": "tiny", "layers": 2}, "space": {"tp": 0}, "buget": {"trials": 3}}
    file.write_text(yaml.safe_dump({**CAMPAIGN, **wrong}))
    refused = ends(run("campaign", "submit", str(file)), 2)
    lines = [line.removeprefix("Error: ") for line in refused.stderr.splitlines()]
    fields = [line.partition(":")[0] for line in lines]
    assert fields == ["buget", "model.layers", "space.global_batch_size", "space.tp"]
    assert "did you mean 'budget'?" in lines[0]
    assert "did you mean 'num_layers'?" in lines[1]


def test_a_campaign_is_listed_with_its_progress(run, measured, name: str) -> None:
    measured(name, FASTER[:2])
    (row,) = [line for line in run("campaign", "list").output.splitlines() if name in line]
    for words in ("RUNNING", "2/4", "2,000"):
        assert words in row
    listed = json.loads(run("campaign", "list", "--json").stdout)["campaigns"]
    assert name in [campaign["name"] for campaign in listed]


def test_a_campaign_is_shown_with_its_best_trial_and_what_it_took(run, measured, name: str) -> None:
    measured(name, FASTER[:2])
    shown = run("campaign", "show", name).output
    assert "best          2,000 tokens/s, trial 2" in shown
    assert "constants     generic constants" in shown
    assert "precision     fp32\n" in shown
    # Probes of 16 s on one and on two of four devices, of twelve steps of 1.024 s and of 0.512 s.
    shares = "iterations 19.2%, start 18.3%, idle 62.5%, lost 0.0%"
    assert f"cost          32 node-seconds held: {shares}" in shown
    assert json.loads(run("campaign", "show", name, "--json").stdout)["spec"]["name"] == name


def test_idle_allocations_are_stated_beside_what_probes_held(run, measured, store, name) -> None:
    campaign = measured(name, FASTER[:2])
    with store._db.write() as session:
        session.get_one(Campaign, campaign).allocation_idle_node_seconds = 18.0
    cost = (
        "cost          32 node-seconds held: iterations 19.2%, start 18.3%, idle 62.5%, lost 0.0%"
    )
    shown = run("campaign", "show", name).output
    assert f"{cost}; 18 node-seconds of idle allocations, which no budget counts" in shown
    assert "used          0 s, 32 node-seconds" in shown


def test_the_cost_before_the_first_probe_has_ended_is_not_idle_time(
    run, measured, store, name
) -> None:
    campaign = measured(name)
    with store._db.write() as session:
        session.get_one(Campaign, campaign).allocation_idle_node_seconds = 18.0
    shown = run("campaign", "show", name).output
    assert "cost          no probe has ended yet; 18 node-seconds of idle allocations" in shown
    assert "100.0%" not in shown


def test_a_campaign_is_paused_resumed_and_cancelled(run, measured, store, name: str) -> None:
    measured(name)
    assert run("leaderboard", name).output == f"campaign {name} has no ranked trial yet\n"
    for action, state in [("pause", "PAUSED"), ("resume", "RUNNING"), ("cancel", "CANCELLED")]:
        done = ends(run("campaign", action, name, "--json"), 0)
        assert json.loads(done.stdout)["state"] == state == store.campaigns.by_name(name).state
    ends(run("campaign", "resume", name), 1, "CANCELLED and cannot be resumed")


def test_watch_follows_a_campaign_to_its_end(run, measured, store, name: str) -> None:
    campaign = measured(name, FASTER[:1])
    results: list[Result] = []
    watching = threading.Thread(target=lambda: results.append(run("campaign", "watch", name)))
    watching.start()
    worker = make_worker(store, "w2", devices_per_node=4)
    outcome = completed(LAYOUTS[3], tokens_per_s=5000.0)
    run_trial(store, campaign, LAYOUTS[3], outcome, worker=worker.id)
    store.campaigns.end(campaign, "COMPLETED", "budget", "2 trials ended")
    watching.join(20)
    result = ends(results[0], 0)
    assert "\x1b" not in result.output, "in a pipe there are plain lines"
    told = f"{name}: COMPLETED, 2 of 4 trials done, best 5,000 tokens/s, ended: 2 trials ended"
    assert result.output.splitlines()[-1] == told

    store.campaigns.end(measured(f"{name}-2"), "FAILED", "driver", "it is broken")
    done = run("campaign", "watch", f"{name}-2")
    assert (done.exit_code, "it is broken" in done.output) == (1, True)


def test_an_export_overwrites_nothing_unasked(run, measured, name: str, tmp_path: Path) -> None:
    measured(name, FASTER[:2])
    out = tmp_path / "deep" / "job"
    ends(run("export", name, "--format", "trainer", "--out", str(out)), 0)
    assert json.loads((out / "job.json").read_text())["layout"] == LAYOUTS[1].to_mapping()
    ends(run("export", name, "--format", "trainer", "--out", str(out), "--trial", "1"), 1, "exists")
    assert json.loads((out / "job.json").read_text())["layout"] == LAYOUTS[1].to_mapping()
    forced = run("export", name, "--format", "trainer", "--out", out, "--trial", "1", "--force")
    ends(forced, 0)
    assert json.loads((out / "job.json").read_text())["layout"] == LAYOUTS[0].to_mapping()


def test_an_export_is_printed_as_json_and_of_no_unknown_format(
    run, measured, name: str, tmp_path: Path
) -> None:
    measured(name, FASTER[:2])
    printed = json.loads(run("export", name, "--format", "megatron-lm", "--json").stdout)
    assert printed["trial"] == 2
    ends(run("export", name, "--format", "paper", "--out", str(tmp_path / "none")), 2)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("content", [None, "mine"], ids=["dangling", "to a file"])
def test_an_export_replaces_a_link_without_following_it(
    run, measured, tmp_path: Path, content: str | None
) -> None:
    name = f"linked-{content}"
    measured(name, FASTER[:2])
    outside, out = tmp_path / "outside", tmp_path / "job"
    out.mkdir()
    if content is not None:
        outside.write_text(content)
    (out / "job.json").symlink_to(outside)
    command = ("export", name, "--format", "trainer", "--out", str(out))
    ends(run(*command), 1, "exists")
    ends(run(*command, "--force"), 0)
    assert not (out / "job.json").is_symlink()
    assert json.loads((out / "job.json").read_text())["layout"] == LAYOUTS[1].to_mapping()
    assert (outside.read_text() if outside.exists() else None) == content


def test_an_export_that_cannot_replace_a_file_leaves_nothing_of_its_own(
    run, measured, name: str, tmp_path: Path
) -> None:
    measured(name, FASTER[:2])
    command = ("export", name, "--format", "trainer", "--out", str(tmp_path))
    ends(run(*command), 0)
    kept = sorted(path.name for path in tmp_path.iterdir())
    (tmp_path / "job.json").unlink()
    (tmp_path / "job.json").mkdir()
    assert run(*command, "--force").exit_code == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


@pytest.mark.parametrize(
    ("url", "secret", "says"),
    [
        (None, None, "layout-tuner up"),
        ("http://127.0.0.1:9", b"x", "http://127.0.0.1:9 does not answer"),
        ("nonsense", b"x", "nonsense"),
        ("http://[zz]", b"x", ""),
        ("http://a:b", b"x", ""),
        ("ftp://127.0.0.1/", b"x", ""),
        ("SERVICE", b"wrong", "no valid token"),
        ("SERVICE", b"", "holds no token"),
        ("SERVICE", b"\xff", "holds no token"),
        ("SERVICE", b"two words", "holds no token"),
    ],
)
def test_without_a_service_or_a_valid_token_a_command_is_one_clear_error(
    service: ServeProcess, tmp_path: Path, url: str | None, secret: bytes | None, says: str
) -> None:
    words = ["campaign", "list", "--data-dir", str(tmp_path)]
    if url is not None:
        words += ["--url", service.service["url"] if url == "SERVICE" else url]
    if secret is not None:
        (tmp_path / "token").write_bytes(secret)
        words += ["--token-file", str(tmp_path / "token")]
    done = ends(CliRunner().invoke(main, words), 1)
    assert isinstance(done.exception, SystemExit)
    assert says in done.output
    if says == "holds no token":
        assert f"{tmp_path / 'token'} {says}" in done.output
    assert len(done.output.splitlines()) == 1


def test_a_proxy_of_the_environment_is_not_used_for_loopback(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert run("campaign", "list").exit_code == 0


def printed_commands(printed: str) -> list[str]:
    lines = printed.splitlines()
    return [line.partition(": ")[2] for line in lines if line.startswith("run it ")]


@pytest.mark.parametrize(
    ("format_name", "out"), [*zip(FORMATS, itertools.cycle(["a job's", "-job", "/"]))]
)
def test_the_commands_that_an_export_prints_name_its_files_from_here(
    run,
    measured,
    store,
    out: str,
    format_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    campaign = "exported-commands"
    if not [each for each in store.campaigns.find() if each.name == campaign]:
        measured(campaign, [(ANYWHERE, 1000.0)], model="tiny-llama")
    folder = tmp_path / "absolute" if out == "/" else Path(out)
    done = ends(run("export", campaign, "--format", format_name, f"--out={folder}"), 0)
    commands = [shlex.split(line) for line in printed_commands(done.stdout)]
    assert commands
    for words in commands:
        (file,) = [word for word in words if Path(word).is_file()]
        assert Path(file).parent == folder
        assert not file.startswith("-")
    if format_name == "megatron-lm":
        words[words.index("MEGATRON_DIR=/path/to/Megatron-LM")] = "MEGATRON_DIR="
        started = subprocess.run(words, capture_output=True, text=True, check=False)
        assert "set it to a checkout of Megatron-LM" in started.stderr


def test_formats_are_listed_without_a_campaign_and_nodes_and_dropped_knobs_passed_on(
    run, measured, name: str, tmp_path: Path
) -> None:
    done = ends(run("export", "--list"), 0)
    rows = done.stdout.splitlines()[1:]
    assert [row.split()[0] for row in rows if row.split()[0] in FORMATS] == list(FORMATS)
    assert "needs" in done.stdout.splitlines()[0]
    page = json.loads(run("export", "--list", "--json").stdout)
    assert [each["name"] for each in page["formats"]] == list(FORMATS)
    for each in page["formats"]:
        adapter = FORMATS[each["name"]].adapter
        assert (each["target_version"], each["needs"]) == (adapter.target_version, adapter.needs)

    measured(name, FASTER[:1])
    words = ("export", name, "--format", "megatron-deepspeed", "--out", str(tmp_path))
    why = "without=vpp is not a knob of this layout that megatron-deepspeed lacks"
    ends(run(*words, "--without", "vpp"), 2, why)
    ends(run(*words, "--nodes", "7"), 2, "num_nodes=7")
    assert not list(tmp_path.iterdir())
    assert run(*words, "--without", "colour").exit_code == 2


@pytest.mark.slow
def test_the_commands_that_an_export_prints_train(run, measured, name: str, tmp_path: Path) -> None:
    measured(name, FASTER[:1])
    done = run("export", name, "--format", "trainer", "--out", str(tmp_path / "a job"))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    lines = printed_commands(done.stdout)
    assert len(lines) == 2
    for line in lines:
        trained = subprocess.run(
            f"{line} --steps 3",
            shell=True,
            env=environment,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=110,
            check=False,
        )
        assert trained.returncode == 0, trained.stderr
        assert "step    1" in trained.stdout


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "..", "", "a\x00b"])
def test_an_export_is_written_to_its_folder_whatever_the_service_sends(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {"good": "x", name: "bad"}
    files = [{"name": n, "content": c, "executable": False} for n, c in contents.items()]
    answer = {"format": "f", "trial": 1, "target_version": "1", "commands": [], "notes": []}
    answer |= {"files": files}
    transport = httpx.MockTransport(lambda _request: httpx.Response(200, json=answer))
    client = Client("http://service", "token", transport=transport)
    monkeypatch.setattr("layout_tuner.cli.service.service_connection.connect", lambda *_: client)
    words = ["export", "c", "--format", "trainer", "--out", str(tmp_path / "out"), "--force"]
    done = CliRunner().invoke(main, words)
    ends(done, 1, f"the service sent the file name {name!r}; nothing written")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.slow
def test_watch_survives_a_service_that_is_started_again(tmp_path: Path) -> None:
    service = ServeProcess(tmp_path)
    port = service.service["url"].rpartition(":")[2]
    service.post("/campaigns", CAMPAIGN)
    store = TimelyStore(DataDir(tmp_path).database_url)
    words = ["campaign", "watch", "first", "--data-dir", str(tmp_path)]
    watching = subprocess.Popen(
        [sys.executable, "-m", "layout_tuner", *words], stdout=subprocess.PIPE, text=True
    )
    assert "RUNNING" in watching.stdout.readline()
    service.end()
    store.campaigns.end(1, "COMPLETED", "budget", "done")
    store.close()
    service.start(port=port)
    rest, _ = watching.communicate(timeout=40)
    service.end()
    assert watching.returncode == 0
    assert rest.splitlines()[-1].endswith("ended: done")


def test_the_leaderboard_shows_zero_groups() -> None:
    assert zero(Layout(dp=4)) == "0"
    assert zero(Layout(dp=4, zero_stage=1)) == "1"
    assert zero(Layout(dp=4, zero_stage=1, zero_replicas=2)) == "1x2"
