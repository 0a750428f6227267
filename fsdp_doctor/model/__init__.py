"""Frozen records that travel between the layers. Standard library only."""
