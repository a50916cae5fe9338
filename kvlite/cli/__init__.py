"""The command line: one file a command, no logic."""

BAD_INPUT, INTERRUPTED, TERMINATED = 2, 130, 143
