"""What changed between two runs, how sure that is, and which field did it."""
