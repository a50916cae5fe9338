"""An OpenAI-compatible server: what programs on this machine ask of one model."""
