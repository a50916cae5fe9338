"""Reading and answering: the order in which layers run, and what they attend to."""
