"""The command that a trial's page shows, read by the command line that it is for."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from api.report.probe_command import MODEL_FILE, probe_command
from search_spaces.spec.layout import KNOBS, Layout
from search_spaces.spec.presets.clusters import CLUSTER_PRESETS, LOCAL_CPU, resolve_cluster
from search_spaces.spec.presets.models import MODEL_PRESETS, resolve_model
from workers.command_line.command_input import described
from workers.command_line.options import layout_of
from workers.commands.commands import probe

LOCAL, _warning = resolve_cluster(LOCAL_CPU)
TINY = MODEL_PRESETS["tiny"].to_mapping()


def spec(**changes: Any) -> dict[str, Any]:
    return {"model": TINY, "cluster": {"name": LOCAL_CPU}, "seed": 0, **changes}


def options_of(line: str) -> dict[str, Any]:
    words = shlex.split(line)
    assert words[:2] == ["layout-tuner", "probe"]
    return probe.make_context("probe", words[2:]).params


layouts = st.builds(
    Layout,
    **{
        name: st.integers(1, 64) if knob.is_count else st.sampled_from(knob.choices)
        for name, knob in KNOBS.items()
        if name != "num_nodes"
    },
)


@given(layouts)
def test_the_command_line_reads_the_same_layout(layout: Layout) -> None:
    command = probe_command(spec(), layout)
    given = options_of(command.line)
    knobs = {name: given[name] for name in (*KNOBS, "global_batch_size") if name != "num_nodes"}
    # Under any cluster: the default precision depends on it.
    for cluster in (LOCAL, CLUSTER_PRESETS["frontier"]):
        assert layout_of(knobs, cluster) == layout
    assert resolve_model(described(given["model"])).to_mapping() == TINY


def test_settings_of_the_probe_are_in_it_and_the_limit_where_memory_ran_out() -> None:
    changed = spec(
        seed=7,
        probe={"warmup": 3, "iterations": 20, "deadline_s": 60.0, "compile": True},
        cluster={"name": "frontier", "device_memory_bytes": 123_456_789_013},
    )
    given = options_of(probe_command(changed, Layout(tp=2)).line)
    wanted = {"seed": 7, "warmup": 3, "steps": 20, "deadline": 60.0, "compiled": True}
    wanted |= {"cluster": "frontier", "memory_limit_gb": None}
    assert {name: given[name] for name in wanted} == wanted
    limited = options_of(probe_command(changed, Layout(tp=2), is_limited=True).line)
    assert limited["memory_limit_gb"] * (1 << 30) == 123_456_789_013, "to the byte"


def test_a_model_of_no_preset_is_a_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {**TINY, "name": "; rm -rf / #", "num_layers": 6}
    command = probe_command(spec(model=own), Layout())
    assert command.model == own
    assert "rm -rf" not in command.line
    monkeypatch.chdir(tmp_path)
    (tmp_path / MODEL_FILE).write_text(yaml.safe_dump(command.model))
    given = options_of(command.line)
    assert resolve_model(described(given["model"])).to_mapping() == own


def test_a_layout_over_several_nodes_has_no_command() -> None:
    assert probe_command(spec(), Layout(num_nodes=2, tp=8, dp=2)) is None
