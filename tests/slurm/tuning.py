"""A service beside a pretended site, and campaigns that run in its allocations."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from layout_tuner.cli.processes.allocation import allocation
from tests.kit.api import ends
from tests.kit.campaigns import space_of
from tests.kit.services import ServeProcess
from tests.kit.waiting import wait_until
from tests.slurm.site import SlurmSite

ROOT = Path(__file__).parents[2]
_ENDED = ("COMPLETED", "FAILED", "CANCELLED")


class Tuning:
    """`layout-tuner serve` and `driver` as processes; a site whose jobs reach them by loopback."""

    def __init__(self, site: SlurmSite, directory: Path) -> None:
        self.site = site
        self.directory = directory
        self._serve = ServeProcess(directory / "data")
        self._log = (directory / "driver.log").open("ab")
        self._driver = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "layout_tuner",
                "driver",
                "--data-dir",
                str(directory / "data"),
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def close(self) -> None:
        self._driver.send_signal(signal.SIGTERM)
        self._driver.wait(60)
        self._log.close()
        self._serve.end()

    def get(self, path: str) -> Any:
        return self._serve.get(path)

    def campaign(self, cluster: dict[str, Any], **changes: Any) -> str:
        """Submits a tiny campaign of a cluster; returns its name."""
        document = {
            "name": f"on-{cluster['name']}",
            "model": "tiny",
            "cluster": {name: value for name, value in cluster.items() if name != "site"},
            "objective": "tokens_per_s",
            "strategy": "exhaustive",
            "stop": {"remeasure": 0},
            "budget": {"trials": 4},
            "probe": {"warmup": 2, "iterations": 3, "deadline": "90s"},
            "space": space_of(
                global_batch_size=8, num_nodes=[1, 2], dp=[2, 4], micro_batch_size=[1, 2]
            ),
        }
        return str(self._serve.post("/campaigns", document | changes)["name"])

    def allocate(self, cluster: dict[str, Any], *options: str) -> int:
        """Submits an allocation of a cluster, as its user would; returns the job's id."""
        file = self.directory / f"{cluster['name']}.json"
        file.write_text(json.dumps(cluster))
        words = [
            "submit",
            f"--cluster={file}",
            "--nodes=2",
            "--time=10m",
            f"--url={self._serve.service['url']}",
            f"--token-file={self.directory / 'data' / 'worker-token'}",
            f"--log={self.directory}/%j.log",
            "--json",
            *options,
        ]
        environment = {
            **self.site.environment,
            "PYTHONPATH": str(ROOT),
            "XDG_STATE_HOME": str(self.directory / "state"),
        }
        found = ends(CliRunner().invoke(allocation, words, env=environment), 0)
        return int(json.loads(found.stdout)["job_id"])

    def show(self, job_id: int) -> dict[str, Any]:
        """What `allocation show` prints of a job as JSON."""
        service, token = self._serve.service["url"], self.directory / "data" / "token"
        words = ["show", str(job_id), "--json", f"--url={service}", f"--token-file={token}"]
        return json.loads(ends(CliRunner().invoke(allocation, words), 0).stdout)

    def cancel(self, job_id: int, *options: str) -> None:
        words = ["cancel", str(job_id), *options]
        ends(CliRunner().invoke(allocation, words, env=self.site.environment), 0)

    def log(self, job_id: int) -> str:
        path = self.directory / f"{job_id}.log"
        return path.read_text()[-6000:] if path.exists() else "the job has printed nothing yet"

    def trials(self, campaign: str, state: str | None = None) -> list[dict[str, Any]]:
        query = f"&state={state}" if state else ""
        return self.get(f"/campaigns/{campaign}/trials?limit=200{query}")["trials"]

    def attempts(self, campaign: str) -> list[list[dict[str, Any]]]:
        """The attempts at each of the campaign's trials."""
        return [self.get(f"/trials/{trial['id']}")["attempts"] for trial in self.trials(campaign)]

    def wait_for_completed(self, campaign: str, number: int, job_id: int) -> None:
        def enough() -> bool:
            assert self.site.state(job_id) in ("PENDING", "RUNNING"), self.log(job_id)
            return len(self.trials(campaign, "COMPLETED")) >= number

        wait_until(f"{number} trials of {campaign} are completed", enough, 300)

    def wait_for_end(self, campaign: str, job_id: int) -> dict[str, Any]:
        """The campaign, once it has ended while the job ran."""

        def ended() -> dict[str, Any] | None:
            read = self.get(f"/campaigns/{campaign}")
            if read["state"] in _ENDED:
                return read
            assert self.site.state(job_id) in ("PENDING", "RUNNING"), self.log(job_id)
            return None

        return wait_until(f"campaign {campaign} has ended", ended, 400)


def cpu_cluster(name: str, **site: Any) -> dict[str, Any]:
    """Nodes of two CPU cores, which are all this host, each at a loopback address of its own."""
    return {
        "name": name,
        "device": "CPU core",
        "num_nodes": 4,
        "devices_per_node": 2,
        "device_memory_gb": 1,
        "site": {
            "node_address": "127.0.5.1{index}",
            "drain_s": 10,
            "environment": {"OMP_NUM_THREADS": "1"},
            **site,
        },
    }
