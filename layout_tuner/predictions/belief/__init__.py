"""Step times and peaks of layouts as mean and spread: estimates corrected by measurements."""
