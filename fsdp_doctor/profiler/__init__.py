"""Run short real training steps and record what they cost."""
