"""Models with layers of several kinds through a service: stored, imported, compared, exported."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from layout_tuner.documents.json_and_yaml import read_yaml, write_yaml
from layout_tuner.search_spaces.models.model_presets import MODEL_PRESETS
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.tables import read_table
from layout_tuner.search_spaces.tables.writing import model_values
from tests.kit.api import Api, Command, ends
from tests.search_spaces.tables.tables import make_row, make_text

HYBRID = ModelShape.from_mapping(
    {
        "name": "little-hybrid",
        "family": "llama",
        "num_layers": 8,
        "hidden_size": 512,
        "ffn_hidden_size": 1024,
        "num_heads": 8,
        "seq_length": 512,
        "vocab_size": 8192,
        "layer_kinds": ["mamba2", "dense", "full", "dense"],
        "mamba_num_heads": 16,
        "mamba_head_dim": 64,
        "mamba_state_dim": 16,
        "mamba_num_groups": 4,
        "activation": "relu2",
    }
)
SOURCE = "Megatron-LM runs"


def rows_of(model: ModelShape) -> list[dict[str, Any]]:
    """Two layouts of a model on eight devices, the second one faster."""
    values = {name: each for name, each in model_values(model).items() if each is not None}
    layouts = ({"tp": 1, "dp": 8, "pp": 1}, {"tp": 2, "dp": 2, "pp": 2})
    return [
        make_row(
            **(values | layout),
            source=SOURCE,
            num_microbatches=8 // layout["dp"],
            step_time_s=0.5 / number,
        )
        for number, layout in enumerate(layouts, 1)
    ]


def test_a_model_of_a_file_is_put_listed_and_shown(command: Command, tmp_path: Path) -> None:
    (file := tmp_path / "hybrid.yaml").write_text(write_yaml(HYBRID.to_mapping()))
    ends(command("model", "put", "little-hybrid", str(file)), 0)
    (line,) = [
        each
        for each in command("model", "list").output.splitlines()
        if each.startswith("little-hybrid")
    ]
    assert f"{HYBRID.num_parameters:,}" in line
    shown = command("model", "show", "little-hybrid").output
    assert read_yaml(shown.encode()) == HYBRID.to_mapping()
    assert "layer_kinds: [mamba2, dense, full, dense]" in shown
    file.write_text(write_yaml(HYBRID.to_mapping() | {"mamba_head_dim": 0}))
    refused = command("model", "put", "little-hybrid", str(file))
    ends(refused, 2, "the model's mamba_head_dim is missing, which mamba2 needs")


@pytest.mark.parametrize("model", [HYBRID, MODEL_PRESETS["tiny-mla"]], ids=lambda each: each.name)
def test_a_table_is_imported_compared_exported_and_printed(
    api: Api, command: Command, tmp_path: Path, model: ModelShape
) -> None:
    name = f"of-{model.name}"
    (file := tmp_path / "theirs.csv").write_text(make_text(*rows_of(model)))
    ends(command("campaign", "import", str(file), "--name", name), 0, f"campaign {name} imported")
    assert api.get(f"/campaigns/{name}")["spec"]["model"] == model.to_mapping()
    board = command("leaderboard", name, "--csv").output
    first = next(csv.DictReader(io.StringIO(board)))
    assert {column: first[column] for column in first if column.startswith("model.")} == {
        column: str(each)
        for column, each in model_values(model).items()
        if column.startswith("model.") and each is not None
    }
    kept = api.http.get(f"/v1/campaigns/{name}/leaderboard", params={"format": "parquet"})
    assert kept.status_code == 200, kept.text
    columns = parquet.read_table(io.BytesIO(kept.content)).column_names
    assert {*columns} >= {column for column in first if column.startswith("model.")}
    printed = read_table(command("campaign", "table", name).output)
    assert [cell.model for cell in printed.cells] == [model]
    assert api.http.get(f"/compare?trials={name}/1+2").status_code == 200
    exported = api.get(f"/campaigns/{name}/exports", format="megatron-lm", trial=1)
    said = "--hybrid-layer-pattern" if model is HYBRID else "--multi-latent-attention"
    assert said in str(exported)


def test_a_replay_reads_the_columns(command: Command, tmp_path: Path) -> None:
    (file := tmp_path / "theirs.csv").write_text(make_text(*rows_of(HYBRID)))
    done = command("replay", str(file), "--strategy", "random", "--seeds", "1", "--jobs", "1")
    ends(done, 0, "little-hybrid on 8 x testbox")
    rows = [{**row, "model.mamba_head_dim": "wide"} for row in rows_of(HYBRID)]
    file.write_text(make_text(*rows))
    ends(command("replay", str(file)), 2, "row 1 (line 2): model.mamba_head_dim='wide'")
