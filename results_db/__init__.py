"""The database: tables, migrations, and the store that the service and the driver share."""
