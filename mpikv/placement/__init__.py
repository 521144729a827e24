"""Where each key lives and which path its gradients take: pure values, the same on every rank."""
