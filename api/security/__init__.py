"""Authentication, roles, rate limits and ownership."""
