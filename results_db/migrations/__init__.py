"""Migrations of the database, and the frozen tables that they create."""
