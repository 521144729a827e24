"""How a store is put together: the ranks come together, roles and devices are found."""
