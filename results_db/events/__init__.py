"""The log that events of campaigns are read from, versions of lists, and live states."""
