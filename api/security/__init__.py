"""Authentication, sessions of browsers, roles and ownership."""
