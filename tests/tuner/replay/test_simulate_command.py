"""`layout-tuner simulate`."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from search_spaces.tables import read_table
from tuner.replay.simulate_command import simulate
from workers.simulation.scenarios import SCENARIOS


def test_a_table_is_written_that_replays_can_read(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    ended = CliRunner().invoke(simulate, ["a100-1.3b", "--seed", "2", "--out", str(path)])
    assert ended.exit_code == 0, ended.output
    assert "simulated layouts" in ended.stderr
    [cell] = read_table(path).cells
    assert cell.key.source == "simulated a100-1.3b, seed 2"
    printed = CliRunner().invoke(simulate, ["a100-1.3b", "--seed", "2"])
    assert printed.stdout == path.read_text()


def test_without_a_scenario_the_known_ones_are_listed() -> None:
    ended = CliRunner().invoke(simulate, [])
    assert [line.split()[0] for line in ended.stdout.splitlines()] == list(SCENARIOS)


def test_an_unknown_scenario_is_bad_usage_and_a_folder_no_file(tmp_path: Path) -> None:
    unknown = CliRunner().invoke(simulate, ["h100"])
    assert unknown.exit_code == 2
    assert "unknown scenario 'h100'" in unknown.stderr
    missing = str(tmp_path / "nowhere" / "table.csv")
    unwritable = CliRunner().invoke(simulate, ["a100-1.3b", "--out", missing])
    assert unwritable.exit_code == 1
    assert "can't be written" in unwritable.stderr


def test_a_step_is_written_as_a_trace_and_an_impossible_one_refused() -> None:
    key = "n1-tp2-pp4-dp1-vpp1-mbs1-mb8-z0-rc_none-sp0-bf16"
    ended = CliRunner().invoke(simulate, ["a100-1.3b", "--trace", key])
    assert ended.exit_code == 0, ended.output
    passes = [each for each in json.loads(ended.stdout)["traceEvents"] if each["ph"] == "X"]
    # 8 micro-batches pass 4 stages twice, and 3 boundaries twice.
    assert len(passes) == 8 * 4 * 2 + 8 * 3 * 2
    for wrong in ("tp2", key.replace("tp2", "tp7")):
        refused = CliRunner().invoke(simulate, ["a100-1.3b", "--trace", wrong])
        assert refused.exit_code == 2
        assert wrong in refused.stderr
