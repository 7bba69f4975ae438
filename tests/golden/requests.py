"""Requests and commands that the golden files record."""

from __future__ import annotations

from typing import Any, Final

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
    _campaign("unknown knob", space={**CAMPAIGN["space"], "offload": [1, 2]}),
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
