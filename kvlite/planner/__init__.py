"""Planning: how much memory a conversation will take, and whether it fits."""
