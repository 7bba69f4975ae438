"""Alembic's migrations, and the frozen tables that they create."""
