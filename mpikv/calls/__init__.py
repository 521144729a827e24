"""What a call of a store was given: forms of arguments, rows, and calls that come again."""
