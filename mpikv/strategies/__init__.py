"""Who adds the gradients, when, and where the optimizer runs."""
