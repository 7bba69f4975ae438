"""Requests that are refused, command lines, and the exit codes of these."""

from __future__ import annotations

import json
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any, Final

from click.testing import CliRunner

from layout_tuner.cli.main import main
from tests.kit.api import CAMPAIGN

UNSENDABLE: Final = None
"""Stands for no body."""


def _campaign(wrong: str, **changes: Any) -> tuple[str, str, str, Any]:
    return f"campaign, {wrong}", "POST", "/campaigns", {**CAMPAIGN, "name": "wrong", **changes}


REFUSED: Final[list[tuple[str, str, str, Any]]] = [
    _campaign("name with spaces", name="a b"),
    _campaign("unknown field", objectives="tokens_per_s"),
    _campaign("unknown model", model="gpt-23b"),
    _campaign("unknown cluster", cluster="frontiers"),
    _campaign("unknown objective", objective="speed"),
    _campaign("objective that cannot rank", objective="memory_headroom"),
    _campaign("unknown strategy", strategy="luck"),
    _campaign("no budget", budget={}),
    _campaign("budget of nothing", budget={"trials": 0}),
    _campaign("unknown knob", space={**CAMPAIGN["space"], "param_offload": [1, 2]}),
    _campaign("wrong range", space={**CAMPAIGN["space"], "tp": {"from": 4, "to": 1}}),
    _campaign("wrong precision", space={**CAMPAIGN["space"], "precision": "nvfp4"}),
    _campaign("no legal layout", space={"global_batch_size": 8, "tp": 3}),
    _campaign("no batch", space={"tp": 1}),
    _campaign("model too large", model="gpt-22b", space={"global_batch_size": 8}),
    _campaign("warm-up too short", probe={"warmup": 1}),
    _campaign("deadline no duration", probe={"deadline": "soon"}),
    _campaign("headroom of all", constraints={"memory_headroom": 1}),
    _campaign("starts from a stranger", start_from=["nobody"]),
    _campaign("illegal baseline", baseline={"tp": 3}),
    _campaign("unknown knob of the baseline", baseline={"global_batch_size": 8}),
    ("campaign, not JSON", "POST", "/campaigns", "{"),
    ("campaign, a list", "POST", "/campaigns", []),
    ("unknown campaign", "GET", "/campaigns/none", UNSENDABLE),
    ("unknown trial", "GET", "/trials/999", UNSENDABLE),
    ("unknown allocation", "GET", "/allocations/none", UNSENDABLE),
    ("unknown parameter", "GET", "/campaigns?colour=red", UNSENDABLE),
    ("limit too high", "GET", "/campaigns?limit=100000", UNSENDABLE),
    ("unknown path", "GET", "/nothing", UNSENDABLE),
    ("wrong method", "PUT", "/campaigns", {}),
    ("preset replaced", "PUT", "/models/gpt-22b", {"preset": "tiny"}),
    ("wrong role", "POST", "/tokens", {"name": "t", "role": "king"}),
    ("worker of no nodes", "POST", "/workers", {"name": "w", "num_nodes": 0}),
    ("lease of a stranger", "POST", "/workers/none/leases", {"max_trials": 1, "wait_s": 0}),
    ("table that is none", "POST", "/campaigns/import", "a,b\n1,2\n"),
]
"""Name, method, path and body."""

FILES: Final = {
    "good.json": json.dumps({**CAMPAIGN, "name": "from-a-file"}),
    "empty.yaml": "",
    "wrong.yaml": "a: [1",
    "invalid.json": json.dumps({**CAMPAIGN, "strategy": "luck"}),
}
ALONE: Final = (
    *("", "--version", "--help", "nonsense", "campaign", "campaign --help", "campaign nonsense"),
    *("campaign show", "campaign show first", "campaign show first --url http://127.0.0.1:9"),
    *("campaign submit missing.yaml", "campaign list --url nonsense", "campaign list --limit 0"),
    *("trial list first --sort colour", "leaderboard first --limit 0", "export first --format x"),
    *("estimate", "estimate --model none --num-microbatches 4", "serve --port 70000"),
    "estimate --model gpt-22b --cluster frontier --tp 8 --pp 4 --num-microbatches 8 --precision bf16",
    "estimate --model gpt-22b --cluster frontier --tp 7 --num-microbatches 8 --precision bf16",
    *("db check", "db upgrade", "db restore none", "token create a --role king", "calibrate -x"),
    *("train --config missing.json", "replay good.json --strategy luck"),
    *("driver --data-dir good.json", "probe --model tiny --tp 0", "cluster put mine missing.yaml"),
    *("allocation submit nonsense", "worker --launcher none", "model show tiny", "up --port -1"),
)
"""Without a service; `db` finds no database."""
SERVED: Final = (
    *("campaign show first", "campaign show none", "campaign submit good.json", "campaign list"),
    *("campaign submit good.json", "campaign submit empty.yaml", "campaign submit wrong.yaml"),
    *("campaign submit invalid.json", "campaign pause from-a-file", "campaign watch none"),
    *("campaign pause from-a-file", "campaign delete from-a-file", "campaign table first"),
    *("leaderboard first", "leaderboard none", "leaderboard first --json", "trial list first"),
    *("trial show 1", "trial show 999", "trial log 1", "trial cancel 1", "export first"),
    *("export first --format embedded --out out", "report first", "whoami", "audit"),
    *("model show tiny", "model show none", "cluster list", "cluster put frontier good.json"),
    *("campaign delete from-a-file --yes", "allocation release none"),
    *("token create a --role viewer", "token list", "token create a --role viewer"),
    *("token revoke nobody", "whoami --token-file good.json"),
)
"""With a service and an admin's token."""


def exit_codes(url: str, token_file: Path) -> list[str]:
    """The exit code of every call, and which streams it wrote to."""
    names = ("URL", "TOKEN_FILE", "WORKER_TOKEN_FILE", "DATABASE_URL", "CERTIFICATE", "KEEP")
    unset = {f"LAYOUT_TUNER_{name}": None for name in names}
    service = {"LAYOUT_TUNER_URL": url, "LAYOUT_TUNER_TOKEN_FILE": str(token_file)}
    with tempfile.TemporaryDirectory() as directory, chdir(directory):
        for name, content in FILES.items():
            Path(name).write_text(content)
        places = {"HOME": directory, "LAYOUT_TUNER_DATA_DIR": f"{directory}/data"}
        alone = {**places, **unset}
        return [
            *(f"alone: layout-tuner {call}: {_exit_code(call, alone)}" for call in ALONE),
            *(
                f"served: layout-tuner {call}: {_exit_code(call, alone | service)}"
                for call in SERVED
            ),
        ]


def _exit_code(call: str, environment: dict[str, str | None]) -> str:
    done = CliRunner().invoke(main, call.split(), env=environment, prog_name="layout-tuner")
    written = [name for name in ("stdout", "stderr") if getattr(done, name)]
    return " ".join([str(done.exit_code), *written])
