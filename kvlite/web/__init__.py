"""What the page and the server share: who may come in, and the thread that does torch's work."""
