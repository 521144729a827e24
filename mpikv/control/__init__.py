"""What workers agree on outside training steps: keys, optimizers, barriers, the end; and who is where meanwhile."""
