"""Output to a terminal: escaping, tables, plurals."""
