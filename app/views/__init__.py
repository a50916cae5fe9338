"""What is shown, as HTML and Markdown."""
