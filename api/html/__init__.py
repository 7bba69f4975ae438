"""HTML that the pages and the report share: rendering, styles, tables, and sentences."""
