"""Events of campaigns and the log that they are read from."""
