"""What stands between the app and whoever sends requests to it, and what gradio lacks."""
