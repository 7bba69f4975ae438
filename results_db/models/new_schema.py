"""A new database: the tables of the models, and triggers that refuse to undo an ending."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sqlalchemy import Connection, text

from layout_tuner.results_db.models.all_tables import METADATA

_ENDED_CAMPAIGN: Final = "('COMPLETED', 'CANCELLED', 'FAILED')"
_ENDED_TRIAL: Final = "('COMPLETED', 'INFEASIBLE', 'FAILED', 'CANCELLED')"

_ENDED_ONCE: Final = {
    "campaigns_end_once": (
        "BEFORE UPDATE OF state ON campaigns",
        f"OLD.state IN {_ENDED_CAMPAIGN} AND NEW.state <> OLD.state",
        "a campaign that has ended stays as it ended",
    ),
    "trials_end_once": (
        "BEFORE UPDATE OF state ON trials",
        f"OLD.state IN {_ENDED_TRIAL} AND NEW.state IN ('PENDING', 'RUNNING')",
        "a trial that has ended neither waits nor runs again",
    ),
    "attempts_end_once": (
        "BEFORE UPDATE OF ending ON attempts",
        "OLD.ending IS NOT NULL AND NEW.ending IS NULL",
        "an attempt that has ended does not run again",
    ),
}
"""Triggers that compare a row with its earlier values: event, condition of a refusal, message."""

_OF_MEASUREMENTS: Final = {
    "measurements_are_results": (
        "INSERT",
        "NEW",
        "NOT IN ('COMPLETED', 'FAILED')",
        "a measurement belongs to a trial with a result",
    ),
    "measurements_stay": (
        "DELETE",
        "OLD",
        "= 'COMPLETED'",
        "a completed trial keeps its measurement",
    ),
}
"""Triggers that look at a measurement's trial: event, row, refused states of the trial, message."""


FUNCTIONS: Final = (*_ENDED_ONCE, *_OF_MEASUREMENTS)
"""The functions of the triggers on PostgreSQL."""


def create_schema(connection: Connection) -> None:
    """Makes the tables, their first rows and the triggers, in an empty database."""
    METADATA.create_all(connection, checkfirst=False)
    for statement in (
        "INSERT INTO driver_lease (id, fence, host, pid) VALUES (1, 0, '', 0)",
        "INSERT INTO sweeps (id) VALUES (1)",
        "INSERT INTO event_counter (id, last_seq) VALUES (1, 0)",
        *(
            _triggers_of_sqlite()
            if connection.dialect.name == "sqlite"
            else _triggers_of_postgresql()
        ),
    ):
        connection.execute(text(statement))


def _triggers_of_sqlite() -> Iterator[str]:
    triggers = {name: (event, when, said) for name, (event, when, said) in _ENDED_ONCE.items()}
    for name, (event, row, refused, said) in _OF_MEASUREMENTS.items():
        when = f"{_state_of_trial(row)} {refused}"
        triggers[name] = (f"BEFORE {event} ON measurements", when, said)
    for name, (event, when, said) in triggers.items():
        yield f"CREATE TRIGGER {name} {event} WHEN {when} BEGIN SELECT RAISE(ABORT, '{said}'); END"


def _triggers_of_postgresql() -> Iterator[str]:
    for name, (event, when, said) in _ENDED_ONCE.items():
        yield _function(name, f"RAISE check_violation USING MESSAGE = '{said}';")
        yield f"CREATE TRIGGER {name} {event} FOR EACH ROW WHEN ({when}) EXECUTE FUNCTION {name}()"
    # A trigger's WHEN cannot look into another table there.
    for name, (event, row, refused, said) in _OF_MEASUREMENTS.items():
        yield _function(
            name,
            f"IF {_state_of_trial(row)} {refused} THEN RAISE check_violation "
            f"USING MESSAGE = '{said}'; END IF; RETURN {row};",
        )
        yield (
            f"CREATE TRIGGER {name} BEFORE {event} ON measurements FOR EACH ROW "
            f"EXECUTE FUNCTION {name}()"
        )


def _function(name: str, body: str) -> str:
    return (
        f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql "
        f"AS $$ BEGIN {body} END $$"
    )


def _state_of_trial(row: str) -> str:
    return f"(SELECT state FROM trials WHERE id = {row}.trial_id)"  # noqa: S608 - words of ours
