"""`layout-tuner trainer`: catalogues of job knobs, without a service."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from layout_tuner.api.schemas.trainer_documents import TrainerRead
from layout_tuner.cli.main import main
from layout_tuner.trainers.registry import ADAPTERS
from tests.kit.api import Api, Command

FILE = """
trainers:
  - name: ours
    version: "0.16.1"
    adapter: megatron-lm
    command: [train, "{arguments}"]
    knobs_allowed: [cuda_graphs, fused]
    knobs:
      cuda_graphs: {values: [attn]}
      fused: {kind: switch, default: false, arguments: [--fused]}
"""


@pytest.fixture(autouse=True)
def _no_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYOUT_TUNER_DATA_DIR", str(tmp_path / "none"))
    for name in ("LAYOUT_TUNER_URL", "LAYOUT_TUNER_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def shown(*words: str, code: int = 0) -> str:
    found = CliRunner().invoke(main, ["trainer", *words], catch_exceptions=False)
    assert found.exit_code == code, found.output
    return found.stderr if code else found.stdout


def test_every_trainer_is_listed_with_its_knobs() -> None:
    listed = shown("list")
    assert all(name in listed for name in ADAPTERS)
    assert "moe_dispatcher, ep_overlap, cuda_graphs" in listed


@pytest.mark.parametrize("name", [name for name, each in ADAPTERS.items() if each.knobs])
def test_a_trainer_is_shown_with_all_that_is_declared(name: str) -> None:
    text, read = shown("show", name), TrainerRead(**json.loads(shown("show", name, "--json")))
    assert [each.name for each in read.knobs] == [*ADAPTERS[name].job_knobs]
    for knob in read.knobs:
        assert f"\n{knob.name}: {knob.help}\n" in text
        assert all(f"written as {line}" in text for line in knob.written)
        assert not knob.when or knob.when in text
        for effect in knob.effects:
            assert f": {effect.words}" in text
            assert effect.source in text


def test_an_effect_is_shown_with_its_spread_and_source() -> None:
    text = shown("show", "megatron-lm")
    assert "  true: 0.62 times (0.42 to 0.91 times) what is exposed of ep [MB#5094" in text
    spread = "1 time (0.84 to 1.2 times) what is exposed of"
    assert f"  bf16: {spread} optimizer; memory of optimizer -33% [" in text
    assert f"  80: {spread} dp; nothing is published\n" in text
    assert "0, 80, 200, 800 (any from 0)" in text
    assert "  deepep only where device not in [gb200" in text
    assert "written as deepep: --moe-token-dispatcher-type flex --moe-flex-dispatcher-b" in text
    assert "full_iteration --no-check-for-nan-in-loss-and-grad (before 0.17)" in text
    assert "it has no job knobs" in shown("show", "nanotron")


def test_a_program_is_shown_as_its_owner_lets_campaigns_set_it(tmp_path: Path) -> None:
    file = tmp_path / "trainers.yaml"
    file.write_text(FILE)
    read = TrainerRead(**json.loads(shown("show", "ours", "--trainers", str(file), "--json")))
    values = {each.name: each.values for each in read.knobs}
    assert values["cuda_graphs"] == ["none", "attn"]
    assert values["fused"] == [False, True]
    assert values["ep_overlap"] == [False]
    refused = shown("show", "theirs", "--trainers", str(file), code=2)
    assert "has no trainer theirs; it has ours" in refused


def test_a_trainer_is_shown_as_the_service_s_worker_offers_it(api: Api, command: Command) -> None:
    offered = {"cuda_graphs": {"kind": "word", "values": ["none"], "default": "none"}}
    trainers = {"megatron-lm": "0.16.1", "ours": "3"}
    knobs = dict.fromkeys(trainers, offered)
    api.register("w", cluster="c", trainers=trainers, trainer_knobs=knobs)
    for name, version in trainers.items():
        read = TrainerRead(**json.loads(command("trainer", "show", name, "--json").stdout))
        assert (read.target_version, [each.values for each in read.knobs]) == (version, [["none"]])
    listed = command("trainer", "list").stdout
    assert "\nours " in listed
    unknown = command("trainer", "show", "nope")
    assert "there is no trainer 'nope'" in unknown.stderr
