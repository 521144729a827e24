"""Which ranks own each key and which path its gradients take: pure values, the same on every rank."""
