"""What the workers of a store agree on, and how they wait, stop, report and leave."""
