"""Open a model: find it, state its shape from the config alone, load its weights."""
