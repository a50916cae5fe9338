"""Weights in host RAM or in files, brought to the device layer by layer."""
