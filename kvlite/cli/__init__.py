"""The command line: one file a command, no logic."""

BAD_INPUT, INTERRUPTED, PIPE_CLOSED, TERMINATED = 2, 130, 141, 143
