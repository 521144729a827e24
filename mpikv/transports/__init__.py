"""Transports: ranks that send each other bytes."""
