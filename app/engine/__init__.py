"""The engine's thread, the model, the conversation in memory, and what answers were made from."""
