"""Conversations: history, turns, checkpoints, files, and the figures of an answer."""
