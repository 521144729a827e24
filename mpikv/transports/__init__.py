"""Ranks, messages and progress."""
