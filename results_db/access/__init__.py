"""Tokens, ownership and the audit log."""
