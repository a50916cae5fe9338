"""A chat at a terminal: what is typed, what it does, what is drawn."""
