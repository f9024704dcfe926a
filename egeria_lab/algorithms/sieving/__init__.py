"""Data sieving: which samples are trained on, what is known of each, and how they are exchanged."""
