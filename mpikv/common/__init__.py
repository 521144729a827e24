"""Checks of arguments, files, the clock, digests."""
