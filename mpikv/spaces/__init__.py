"""Where an array's memory is, and how it is worked on there: base.py says what a space is."""
