"""Administration of a database: backup, restore and checks."""
