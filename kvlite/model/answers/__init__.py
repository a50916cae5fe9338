"""How a model writes answers: reasoning, text, and calls of tools, by its chat template."""
