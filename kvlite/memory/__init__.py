"""Measuring memory, limiting it, and recovering when it runs out."""
