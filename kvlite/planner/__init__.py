"""What memory a conversation takes, and whether it fits, before it begins."""
