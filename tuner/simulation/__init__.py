"""A simulated cluster, whose truth is another one than the closed form that searches it."""
