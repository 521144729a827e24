"""What a run tells its user."""
