"""Options of simulated workers that make no sense: each gets a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.services import run_here


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("worker --simulate frontire", "unknown cluster 'frontire'"),
        ("worker --simulate local-cpu", "no peak_flops_per_s, and simulated nodes cannot"),
        ("worker --simulate frontier --time-scale -1", "--time-scale=-1 is not"),
        ("worker --simulate frontier --time-scale nan", "'nan' is not a valid float"),
        ("worker --simulate frontier --workers 0", "--workers=0 is not a number"),
        ("worker --simulate frontier --seed -3", "--seed=-3 is under 0"),
        ("worker --simulate frontier --cluster frontier", "--cluster and --simulate"),
        ("worker --simulate frontier --launcher ray", "simulated nodes run no program"),
        ("worker --workers 2", "--workers is for simulated workers; add --simulate"),
        ("up --nodes 4", "--nodes and --simulate go together"),
        ("up --simulate frontier --cluster tiny", "--cluster and --simulate exclude"),
        ("up --time-scale 2", "--time-scale is for simulated workers"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, words: str, sentence: str) -> None:
    (token := tmp_path / "token").write_text("lt_secret\n")
    where = ["--url", "http://127.0.0.1:9", "--token-file", str(token)]
    if words.startswith("up"):
        where = ["--data-dir", str(tmp_path / "data")]
    refused = run_here(*words.split(), *where)
    assert refused.exit_code != 0
    assert sentence in " ".join(refused.output.split())
