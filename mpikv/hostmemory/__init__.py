"""What the ranks of one host share."""
