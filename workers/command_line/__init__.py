"""Input and options that the commands of several folders share."""
