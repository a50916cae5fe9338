"""Settings and where they come from: command line, environment, profiles, defaults."""
