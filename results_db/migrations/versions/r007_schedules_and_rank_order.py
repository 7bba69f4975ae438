"""The pipeline's schedule, and the order of ranks.

Revision: r007, after r006. Earlier trials have the defaults.
"""

from alembic import op

revision = "r007"
down_revision = "r006"
branch_labels = None
depends_on = None

_KNOBS = {
    "schedule": ("1f1b", "gpipe", "zero_bubble"),
    "rank_order": ("tp_cp_dp_pp", "tp_cp_pp_dp"),
}
"""Their words, the default first."""


def upgrade() -> None:
    for name, words in _KNOBS.items():
        allowed = ", ".join(f"'{word}'" for word in words)
        check = f"CONSTRAINT ck_trials_{name} CHECK ({name} IN ({allowed}))"
        column = f"{name} VARCHAR(16) DEFAULT '{words[0]}' NOT NULL {check}"
        op.execute(f"ALTER TABLE trials ADD COLUMN {column}")


def downgrade() -> None:
    for name in reversed(_KNOBS):
        op.execute(f"ALTER TABLE trials DROP COLUMN {name}")
