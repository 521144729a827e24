"""The Trainer of a training loop: pushes gradients, pulls weights, saves checkpoints."""
