"""What is compared for a document unless one is told otherwise: light, for front ends."""

from kvlite.config.settings import Settings

# The profile that is made, and how long that may take.
NAME, MINUTES = "tuned", 10
# Of the document to read at a time, at most.
TOKENS = 6000
METHODS = (str(Settings.method), "snapkv")
BUDGETS = ("3%", "6%", "12%", "25%")
KV_BITS = ("16", "4")
RECALL = ("off", str(Settings.recall_entries))
# Nats a token.
MOST_LOST = 0.1
