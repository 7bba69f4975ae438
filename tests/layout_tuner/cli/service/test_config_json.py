"""A model by its config.json of Hugging Face: in commands, campaigns' files, client and service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from click.testing import Result

import layout_tuner
from layout_tuner.client.clients import Client
from layout_tuner.errors import SearchSpaceError
from layout_tuner.search_spaces.models.model_presets import resolve_model
from tests.kit.api import CAMPAIGN, Command, ends
from tests.kit.services import ServeProcess

CONFIG: Final[dict[str, Any]] = {
    "_name_or_path": "ours/our-0.3b",
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "tie_word_embeddings": False,
    "rope_scaling": {"type": "yarn", "factor": 4.0},
}
LACKS: Final = "scaled rotary positions (yarn)"
KNOBS: Final = ("--num-microbatches", "2")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


def done(result: Result) -> str:
    return ends(result, 0).stdout


def test_a_model_is_put_by_its_file_alone(run: Command, config: Path) -> None:
    put = ends(run("model", "put", config, "--seq-length", "128"), 0)
    assert put.stdout == "model our-0.3b is stored; campaign files can name it\n"
    assert put.stderr == f"note: its shape lacks {LACKS}\n"
    shown = yaml.safe_load(done(run("model", "show", "our-0.3b")))
    assert (shown["family"], shown["num_layers"], shown["seq_length"]) == ("llama", 4, 128)
    assert "model mine is stored" in done(run("model", "put", "mine", config, "--seq-length", "64"))
    assert yaml.safe_load(done(run("model", "show", "mine")))["name"] == "mine"
    ends(run("model", "put", "a", "b", config, "--seq-length", "64"), 2, "two names")
    ends(run("model", "put", config), 2, "state it with --seq-length")


def test_a_file_of_our_own_needs_a_name(run: Command, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("preset: tiny\nnum_layers: 6\n")
    ends(run("model", "put", own), 2, "states no name: give [NAME] FILE")
    ends(run("model", "put", "six", own, "--seq-length", "64"), 2, "sequence length in it")
    own.write_text("preset: tiny\nname: our-six\nnum_layers: 6\n")
    assert "model our-six is stored" in done(run("model", "put", own))


def test_a_campaign_names_the_file_beside_it(
    run: Command, service: ServeProcess, config: Path, tmp_path: Path
) -> None:
    model = {"config": config.name, "seq_length": 128, "name": "beside"}
    file = tmp_path / "campaign.yaml"
    file.write_text(yaml.safe_dump({**CAMPAIGN, "name": "by-file", "model": model}))
    shown = json.loads(done(run("campaign", "submit", file, "--json")))
    assert shown["name"] == "by-file"
    assert "model         beside\n" in done(run("campaign", "show", "by-file"))
    assert json.loads(done(run("plan", file, "--json")))["model"] == "beside"
    with Client(service.url, service.token) as client:
        again = client.create_campaign(file, if_exists="return")
        assert again.name == "by-file"
        put = client.put_model("put-so", {"config": str(config), "seq_length": 32})
        assert (put.description["name"], put.description["seq_length"]) == ("put-so", 32)
    file.write_text(yaml.safe_dump({**CAMPAIGN, "model": {**model, "seq_length": None}}))
    ends(run("campaign", "submit", file), 2, "state it with --seq-length, or as seq_length beside")


def test_the_service_reads_no_file(service: ServeProcess, config: Path) -> None:
    model = {"config": str(config), "seq_length": 128}
    refused = service.http.post("/campaigns", json={**CAMPAIGN, "name": "no", "model": model})
    assert refused.status_code == 422
    assert "names a file, which only commands and the Python client read" in refused.text
    whole = {**CAMPAIGN, "name": "no", "model": CONFIG}
    refused = service.http.post("/campaigns", json=whole)
    assert "or give the file itself: `model put FILE --seq-length N`" in refused.text


def test_commands_without_a_service_take_the_file(run: Command, config: Path) -> None:
    options = ("--model", config, "--seq-length", "128", *KNOBS)
    said = json.loads(done(run("estimate", *options, "--json")))
    shape = resolve_model(
        {name: value for name, value in said["model"].items() if value is not None}
    )
    assert (shape.name, shape.seq_length, shape.lacks) == ("our-0.3b", 128, LACKS)
    assert f"note: the model lacks {LACKS}\n" in ends(run("estimate", *options), 0).stderr
    ends(run("estimate", "--model", config, *KNOBS), 2, "state it with --seq-length")
    ends(run("estimate", "--model", "tiny", "--seq-length", "9", *KNOBS), 2, "has its own")
    ends(run("probe", "--model", config, *KNOBS), 2, "state it with --seq-length")
    ends(run("calibrate", "--show", "--model", config), 2, "state it with --seq-length")


def test_python_takes_the_file(config: Path) -> None:
    knobs = {"num_microbatches": 2}
    by_file = layout_tuner.estimate(config, knobs, seq_length=128)
    assert by_file == layout_tuner.estimate(
        {"config": str(config), "seq_length": 128, "name": "our-0.3b"}, knobs
    )
    campaign = {**CAMPAIGN, "model": {"config": str(config), "seq_length": 128}}
    assert layout_tuner.plan(campaign).layouts
    with pytest.raises(SearchSpaceError, match=r"model: no-such\.json: cannot be read"):
        layout_tuner.plan({**CAMPAIGN, "model": {"config": "no-such.json"}})
