"""The database: tables, store and migrations; the only home of SQLAlchemy and Alembic."""
