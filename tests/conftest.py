"""What holds for every test."""

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

# Ray reads its authentication from the environment while it is imported, once a process; DeepHyper
# imports Ray, and the tests of the tuner import DeepHyper.
prepare_environment()
