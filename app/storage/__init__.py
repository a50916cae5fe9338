"""Conversations on disk."""
