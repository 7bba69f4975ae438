"""Peak memory of layouts: the estimate, corrected by measurements."""
