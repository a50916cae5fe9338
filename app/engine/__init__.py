"""What is done by the thread that has the model: answers, and what they were made from."""
