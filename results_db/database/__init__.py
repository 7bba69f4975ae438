"""Connections, transactions, locks, retries and bulk inserts, for SQLite and PostgreSQL."""
