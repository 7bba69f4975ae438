"""Addresses of databases: what is understood, and that no message shows a password."""

import pytest

from results_db.database.url import postgresql_url, shown
from results_db.errors import DatabaseUrlInvalidError


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_a_postgresql_is_named_by_any_of_its_schemes(scheme: str) -> None:
    url = postgresql_url(f"{scheme}://service:s%40cret@db.example:5433/tuning?sslmode=require")
    assert url == "postgresql+psycopg://service:s%40cret@db.example:5433/tuning?sslmode=require"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("mysql://service:sesame@db/tuning", "begins with mysql://, and only postgresql://"),
        ("postgresql+asyncpg://service:sesame@db/tuning", r"begins with postgresql\+asyncpg://"),
        ("sqlite:////tmp/sesame.sqlite3", "SQLite needs no URL"),
        ("postgresql://service:sesame@db", "postgresql://service@db names no database"),
        (
            "postgresql://service:ses@me:x@db:port/tuning",
            "URL is none: write postgresql://USER@HOST",
        ),
        ("tuning sesame", "URL is none"),
        ("", "URL is none"),
    ],
)
def test_what_is_no_address_of_a_postgresql_is_refused_without_showing_it(
    url: str, why: str
) -> None:
    with pytest.raises(DatabaseUrlInvalidError, match=why) as refused:
        postgresql_url(url)
    assert "ses" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_an_address_is_shown_without_its_secrets() -> None:
    url = "postgresql://service:sesame@db/tuning?sslmode=require&password=sesame&sslpassword=sesame"
    assert shown(url) == "postgresql://service@db/tuning?sslmode=require"
    assert shown("sqlite:////srv/data/results.sqlite3") == "/srv/data/results.sqlite3"
