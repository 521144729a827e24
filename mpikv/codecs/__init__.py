"""How a push travels to whoever adds it: base.py says what a codec is, registry.py which there are."""
