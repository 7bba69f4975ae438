"""Administration of a database: backup, restore, checks, and the commands `db`."""
