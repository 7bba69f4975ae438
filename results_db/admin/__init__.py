"""Administration of a database: migrations, backup, restore, checks, retention, statistics."""
