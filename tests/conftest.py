"""What holds for every test."""

import os
import signal

from tests.postgres import (
    database_url,
    empty_postgres_url,
    postgres_server,
    postgres_url,
    sqlite_template,
    sqlite_url,
)
from workers.ray_cluster import prepare_environment

__all__ = [
    "database_url",
    "empty_postgres_url",
    "postgres_server",
    "postgres_url",
    "sqlite_template",
    "sqlite_url",
]

# A database, a service or a token of the user's must not be what tests work on.
for _word in ("DATABASE_URL", "DATA_DIR", "URL", "TOKEN_FILE", "CERTIFICATE", "KEEP"):
    os.environ.pop(f"LAYOUT_TUNER_{_word}", None)

# Processes of pytest-xdist ignore SIGINT, and whatever a test started would ignore it too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Ray reads its authentication from the environment while it is imported, once a process; DeepHyper
# imports Ray, and the tests of the tuner import DeepHyper.
prepare_environment()
