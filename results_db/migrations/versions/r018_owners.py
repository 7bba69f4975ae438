"""Owners, groups, sign-ins, who sees a campaign, quotas, and the use that fair shares count.

Revision: r018, after r017. A database that r007 has just created has the tables already: it creates
those of the models. Earlier tokens become owners of their own, and earlier campaigns are seen by
everyone, as before. Names of campaigns are unique by owner, and among those that everyone sees.
"""

import re
from typing import Any

import sqlalchemy as sa
from alembic import op

from layout_tuner.results_db.migrations.checks import refuse_rows, set_checks
from layout_tuner.results_db.models.all_tables import METADATA
from layout_tuner.results_db.models.service_tables import TokenRow
from layout_tuner.results_db.models.table_base import one_of
from layout_tuner.results_db.records import VISIBILITIES

revision = "r018"
down_revision = "r017"
branch_labels = None
depends_on = None

_UNIQUE = ("device_key", "user_code")
_OF_DEVICES = (*_UNIQUE, "device_part", "part_before", "allowed_by", "asked_from", "asked_at")
_OF_SIGN_INS = ("source", *_OF_DEVICES, "ends_at")
_TABLES = ("owners", "owner_groups", "group_members", "quotas", "recent_use", "past_use")
_CHECKS = {
    "ck_campaigns_visibility": one_of("visibility", VISIBILITIES),
    "ck_campaigns_group_has_a_name": "visibility <> 'group' OR group_name IS NOT NULL",
}
_BY_OWNER = "CONSTRAINT uq_campaigns_created_by_name UNIQUE (created_by, name)"
_BY_NAME = "CONSTRAINT uq_campaigns_name UNIQUE (name)"


def _new_columns() -> dict[str, tuple[sa.Column[Any], ...]]:
    return {
        "tokens": (
            sa.Column("owner", sa.String(64), nullable=False, server_default=""),
            *(sa.Column(name, TokenRow.__table__.c[name].type) for name in _OF_SIGN_INS),
        ),
        "campaigns": (
            sa.Column("visibility", sa.String(8), nullable=False, server_default="everyone"),
            sa.Column("group_name", sa.String(64)),
            sa.Column("priority", sa.Integer, nullable=False, server_default="0"),
        ),
        "browser_sign_ins": (sa.Column("id_token", sa.Text),),
        "events": (
            sa.Column("owner", sa.String(64)),
            sa.Column("visibility", sa.String(8)),
            sa.Column("group_name", sa.String(64)),
        ),
    }


def upgrade() -> None:
    if "visibility" in _columns("campaigns"):
        return
    for table, columns in _new_columns().items():
        for column in columns:
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
    # On which days allocations were idle is not known: it counts when the campaign ended or began.
    op.execute(
        "INSERT INTO past_use (campaign_id, day, idle_allocations) SELECT id, "
        "CAST(date(coalesce(ended_at, created_at)) AS VARCHAR(10)), allocation_idle_node_seconds "
        "FROM campaigns WHERE allocation_idle_node_seconds > 0"
    )
    set_checks("campaigns", _CHECKS)
    _set_unique(_BY_NAME, _BY_OWNER)
    op.create_index(
        "uq_campaigns_name_everyone",
        "campaigns",
        ["name"],
        unique=True,
        sqlite_where=sa.text("visibility = 'everyone'"),
        postgresql_where=sa.text("visibility = 'everyone'"),
    )
    op.create_index("ix_campaigns_name", "campaigns", ["name"])
    for name in _UNIQUE:
        op.create_index(f"uq_tokens_{name}", "tokens", [name], unique=True)


def downgrade() -> None:
    if "visibility" not in _columns("campaigns"):
        return
    refuse_rows("campaigns", "visibility", "visibility <> 'everyone'")
    # Sign-ins end, also those of command lines.
    of_sign_ins = TokenRow.device_key.is_not(None) | TokenRow.source.is_not(None)
    op.execute(sa.update(TokenRow).where(of_sign_ins).values(revoked_at=TokenRow.created_at))
    for name in _UNIQUE:
        op.drop_index(f"uq_tokens_{name}", "tokens")
    op.drop_index("uq_campaigns_name_everyone", "campaigns")
    op.drop_index("ix_campaigns_name", "campaigns")
    set_checks("campaigns", dict.fromkeys(_CHECKS))
    _set_unique(_BY_OWNER, _BY_NAME)
    for table, columns in _new_columns().items():
        for column in columns:
            op.drop_column(table, column.name)
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
