"""Server ranks."""
