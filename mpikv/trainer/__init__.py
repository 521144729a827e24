"""The training loop's side: gradients in, weights out, and what of it is saved."""
