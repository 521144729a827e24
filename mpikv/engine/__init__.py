"""What is under way, and what moves it on."""
