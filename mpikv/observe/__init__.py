"""What the ranks of a run tell their user."""
