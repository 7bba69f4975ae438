"""Tokens, sessions, owners and groups, visibility, shares, quotas and webhooks."""
