"""Weights in host RAM or in files, copied to the device layer by layer."""
