"""A worker whose ranks run another program than the product's: what benchmarks and tests start."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

from layout_tuner.workers.errors import WorkerError
from layout_tuner.workers.worker.run_worker import run_worker


def main() -> None:
    """Works until SIGTERM."""
    parser = argparse.ArgumentParser(prog="benchmarks.workers.live_worker")
    parser.add_argument("--url", required=True)
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--spool-dir", type=Path, required=True)
    parser.add_argument("--rank-entry", required=True)
    parser.add_argument("--cluster", type=json.loads, default='"local-cpu"', help="as JSON")
    parser.add_argument("--ray-address")
    parser.add_argument("--num-nodes", type=int)
    parser.add_argument("--time-left", type=float)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        run_worker(
            url=arguments.url,
            token=arguments.token_file.read_text().strip(),
            described_cluster=arguments.cluster,
            name=arguments.name,
            spool_dir=arguments.spool_dir,
            patience_s=60.0,
            ray_address=arguments.ray_address,
            num_nodes=arguments.num_nodes,
            time_left_s=arguments.time_left,
            rank_entry=arguments.rank_entry,
        )
    except WorkerError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
