"""Conversations as they are kept on disk."""
