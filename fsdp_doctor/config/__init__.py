"""Configs: read them, resolve them by the framework's own rules, diff them, say what it means.

No module here imports torch: a config can be read and compared on any laptop.
"""
