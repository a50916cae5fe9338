"""`kvlite bench`: measure methods on this machine."""
