"""What a rank is doing, which it tells the others when somebody waits too long."""
