"""Arrays of any library, and rows of them, as the store sees them."""
