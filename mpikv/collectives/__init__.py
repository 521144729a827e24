"""Collective algorithms, one file each, and what they share."""
