"""One module per library: its cases, and what the library makes of each."""
