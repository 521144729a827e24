"""Collective algorithms: one file each, chosen by select."""
