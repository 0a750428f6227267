"""Which legal changes make a spec fit: moves as data, their legality, a bounded search."""
