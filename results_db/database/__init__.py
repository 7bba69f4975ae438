"""Connections, transactions, locks, retries, bulk inserts and events, for SQLite and PostgreSQL."""
