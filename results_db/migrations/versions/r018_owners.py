"""Owners and groups with their shares, quotas, sign-ins and webhooks; who sees a campaign.

Revision: r018, after r017. A database that r007 has just created has the tables already: it creates
those of the models. Earlier tokens become owners of their own, and earlier campaigns are seen by
everyone, as before. Names of campaigns are unique by owner, and among those that everyone sees.
"""

import re

import sqlalchemy as sa
from alembic import op

from layout_tuner.results_db.migrations.checks import refuse_rows, set_checks
from layout_tuner.results_db.models.all_tables import METADATA
from layout_tuner.results_db.models.table_base import one_of
from layout_tuner.results_db.records import VISIBILITIES

revision = "r018"
down_revision = "r017"
branch_labels = None
depends_on = None

_TABLES = (
    *("owners", "owner_groups", "group_members", "quotas", "past_use"),
    *("webhooks", "webhook_messages"),
)
_COLUMNS = {
    "tokens": (
        *("owner", "source", "device_key", "device_part", "part_before", "user_code"),
        *("allowed_by", "asked_from", "asked_at", "ends_at"),
    ),
    "campaigns": ("visibility", "group_name", "priority"),
    "events": ("owner", "visibility", "group_name"),
    "browser_sign_ins": ("id_token",),
}
_INDEXES: dict[str, tuple[str, ...]] = {
    "tokens": ("uq_tokens_device_key", "uq_tokens_user_code"),
    "campaigns": ("uq_campaigns_name_everyone", "ix_campaigns_name"),
}
_CHECKS = {
    "ck_campaigns_visibility": one_of("visibility", VISIBILITIES),
    "ck_campaigns_group_has_a_name": "visibility <> 'group' OR group_name IS NOT NULL",
}
_BY_OWNER = "CONSTRAINT uq_campaigns_created_by_name UNIQUE (created_by, name)"
_BY_NAME = "CONSTRAINT uq_campaigns_name UNIQUE (name)"

_WORK = "a.iterations_node_seconds + a.start_node_seconds"
_PAST_USE = f"""
INSERT INTO past_use (
    campaign_id, day, probes, repeats, idle, lost, trials, idle_allocations,
    owner, name, cluster, trainer
)
SELECT c.id, CAST(date(at) AS VARCHAR(10)), sum(probes), sum(repeats), sum(idle), sum(lost),
    sum(trials), sum(idle_allocations), c.created_by, c.name, c.cluster_name, c.trainer
FROM campaigns c JOIN (
    SELECT t.campaign_id, a.ended_at AS at, CASE WHEN t.repeat_of IS NULL THEN {_WORK} ELSE 0 END
        AS probes, CASE WHEN t.repeat_of IS NULL THEN 0 ELSE {_WORK} END AS repeats,
        a.idle_node_seconds AS idle, a.lost_node_seconds AS lost,
        CASE WHEN t.ended_at IS NOT NULL AND t.attempt = a.attempt THEN 1 ELSE 0 END AS trials,
        0 AS idle_allocations
    FROM attempts a JOIN trials t ON t.id = a.trial_id
    WHERE a.ended_at IS NOT NULL
    UNION ALL
    SELECT id, coalesce(ended_at, created_at), 0, 0, 0, 0, 0, allocation_idle_node_seconds
    FROM campaigns WHERE allocation_idle_node_seconds > 0
) u ON u.campaign_id = c.id
GROUP BY c.id, CAST(date(at) AS VARCHAR(10)), c.created_by, c.name, c.cluster_name, c.trainer
"""  # noqa: S608
"""On which days allocations were idle is not known: it counts when the campaign ended or began."""


def upgrade() -> None:
    if "visibility" in _columns("campaigns"):
        return
    for table, names in _COLUMNS.items():
        for model in (METADATA.tables[table].c[name] for name in names):
            default = getattr(model.server_default, "arg", None)
            column = sa.Column(
                model.name, model.type, nullable=model.nullable, server_default=default
            )
            op.add_column(table, column)
    METADATA.create_all(op.get_bind(), tables=[METADATA.tables[name] for name in _TABLES])
    op.execute("UPDATE tokens SET owner = name")
    # Of the earliest of each name; one that never made anything has its token's time.
    op.execute(
        "INSERT INTO owners (name, weight, created_at, created_by) "
        "SELECT name, 1, min(at), 'system' FROM ("
        "SELECT owner AS name, created_at AS at FROM tokens UNION ALL "
        "SELECT created_by, created_at FROM campaigns WHERE created_by <> '') AS made "
        "GROUP BY name"
    )
    op.execute(_PAST_USE)
    set_checks("campaigns", _CHECKS)
    _set_unique(_BY_NAME, _BY_OWNER)
    for table, names in _INDEXES.items():
        for index in METADATA.tables[table].indexes:
            if index.name in names:
                index.create(op.get_bind())


def downgrade() -> None:
    if "visibility" not in _columns("campaigns"):
        return
    refuse_rows("campaigns", "visibility", "visibility <> 'everyone'")
    of_sign_ins = "device_key IS NOT NULL OR source IS NOT NULL"  # they sign in again
    op.execute(f"UPDATE tokens SET revoked_at = created_at WHERE {of_sign_ins}")  # noqa: S608
    for table, names in _INDEXES.items():
        for name in names:
            op.drop_index(name, table)
    set_checks("campaigns", dict.fromkeys(_CHECKS))
    _set_unique(_BY_OWNER, _BY_NAME)
    for table, names in _COLUMNS.items():
        for name in names:
            op.drop_column(table, name)
    for name in reversed(_TABLES):
        op.drop_table(name)


def _set_unique(before: str, after: str) -> None:
    """Replaces a constraint of campaigns: on SQLite by a new table, whose rows keep their ids.

    Foreign keys are off during migrations, so rows that refer to a campaign stay.
    """
    connection = op.get_bind()
    if connection.dialect.name != "sqlite":
        op.execute(f"ALTER TABLE campaigns DROP CONSTRAINT {before.split()[1]}")
        op.execute(f"ALTER TABLE campaigns ADD {after}")
        return
    found = "FROM sqlite_master WHERE tbl_name = 'campaigns' AND sql IS NOT NULL"
    statement = connection.exec_driver_sql(f"SELECT sql {found} AND type = 'table'").scalar_one()
    others = connection.exec_driver_sql(f"SELECT sql {found} AND type <> 'table'").scalars().all()
    used = "SELECT seq FROM sqlite_sequence WHERE name = 'campaigns'"
    last_id = connection.exec_driver_sql(used).scalar_one_or_none()
    assert before in statement
    made = re.sub(r'(?<=CREATE TABLE )"?campaigns"?', "campaigns_new", statement, count=1)
    columns = ", ".join(sorted(_columns("campaigns")))
    connection.exec_driver_sql(made.replace(before, after))
    connection.exec_driver_sql(
        f"INSERT INTO campaigns_new ({columns}) SELECT {columns} FROM campaigns"  # noqa: S608
    )
    connection.exec_driver_sql("DROP TABLE campaigns")
    # Without this, SQLite would also rename the references of other tables.
    connection.exec_driver_sql("PRAGMA legacy_alter_table = ON")
    connection.exec_driver_sql("ALTER TABLE campaigns_new RENAME TO campaigns")
    connection.exec_driver_sql("PRAGMA legacy_alter_table = OFF")
    if last_id is not None:
        connection.exec_driver_sql(
            "DELETE FROM sqlite_sequence WHERE name IN ('campaigns', 'campaigns_new')"
        )
        connection.exec_driver_sql(
            "INSERT INTO sqlite_sequence (name, seq) VALUES ('campaigns', ?)", (last_id,)
        )
    for other in others:
        connection.exec_driver_sql(other)


def _columns(table: str) -> set[str]:
    return {each["name"] for each in sa.inspect(op.get_bind()).get_columns(table)}
