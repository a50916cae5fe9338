"""The command line: one file a command, no logic."""

BAD_INPUT, INTERRUPTED = 2, 130
