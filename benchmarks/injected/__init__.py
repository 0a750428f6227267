"""Pairs of specs with known culprits: what is drawn, how it is run, how an answer is judged."""
