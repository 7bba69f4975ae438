"""What holds for every test."""

import os

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

# Ray reads its authentication from the environment while it is imported, once a process; DeepHyper
# imports Ray, and the tests of the tuner import DeepHyper.
prepare_environment()
