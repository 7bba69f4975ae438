"""Workers and their ranks; the only home of Ray and torch."""
