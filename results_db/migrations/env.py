"""Alembic runs this on the connection that `results_db.migrations.migrate` opened."""

from alembic import context

from layout_tuner.results_db.models.all_tables import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    # Every migration runs inside one transaction that the caller commits, on SQLite too.
    transactional_ddl=True,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
