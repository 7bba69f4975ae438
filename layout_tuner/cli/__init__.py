"""The command line: all commands, their options and their output."""
