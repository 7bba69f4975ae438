"""What the estimates say of one layout, or of every layout of a table: `layout-tuner estimate`."""
