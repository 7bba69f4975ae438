"""One real campaign, from HTTP to a training job."""

import json
from pathlib import Path

import pytest

from search_spaces.spec.layout import Layout

pytestmark = pytest.mark.ranks

NUM_TRIALS = 4
TINY = Path(__file__).parents[2] / "examples" / "tiny.yaml"


@pytest.mark.timeout(280)
def test_a_campaign_goes_from_http_to_a_training_job(service, tmp_path: Path) -> None:
    # All sixteen trials of it run in the tests of the documented commands.
    spec = tmp_path / "tiny.yaml"
    spec.write_text(TINY.read_text().replace("trials: 16", f"trials: {NUM_TRIALS}"))
    submitted = service.run("campaign", "submit", str(spec), "--json")
    assert submitted.returncode == 0, submitted.stderr
    watched = service.run("campaign", "watch", "tiny")
    assert watched.returncode == 0, watched.stderr

    campaign = service.get("/campaigns/tiny")
    assert (campaign["state"], campaign["reason"]) == ("COMPLETED", "budget")
    completed = service.trials("tiny", state="COMPLETED")
    assert len(completed) == NUM_TRIALS, service.logs()

    board = service.get("/campaigns/tiny/leaderboard")["trials"]
    figures = [trial["value"] for trial in board]
    assert figures == sorted(figures, reverse=True)
    assert len(board) == len({trial["layout_key"] for trial in completed}), "repeats count together"
    # How far a guided search goes in four trials follows the machine; one layout is too few.
    assert len(board) > 1
    best = service.get(f"/trials/{board[0]['id']}")
    kinds = [i["kind"] for i in best["iterations"]]
    assert kinds == ["warmup"] * max(2, len(kinds) - 10) + ["timed"] * 10
    assert best["environment"]["torch_version"]

    exported = service.run("export", "tiny", "--format", "trainer", "--out", str(tmp_path / "job"))
    assert exported.returncode == 0, exported.stderr
    job = tmp_path / "job" / "job.json"
    written = Layout.from_mapping(json.loads(job.read_text())["layout"])
    assert written == Layout.from_mapping(board[0]["layout"])
    trained = service.run("train", "--config", str(job), "--steps", "20", "--json")
    assert trained.returncode == 0, trained.stderr
    result = json.loads(trained.stdout)
    assert result["steps"] == 20
    assert result["final_loss"] < best["iterations"][0]["loss"]
    assert result["tokens_per_s"] > 0
