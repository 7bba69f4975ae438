"""Logging of the service's processes: to stderr, each line with its time."""

from __future__ import annotations

import logging
import sys


def log_to_stderr(*packages: str) -> None:
    """Sends the log of packages, from INFO on, to stderr only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for package in packages:
        logger = logging.getLogger(package)
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
