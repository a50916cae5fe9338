"""Measurements that tell the truth: needles, speed, memory."""
