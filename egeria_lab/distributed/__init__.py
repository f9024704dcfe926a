"""Training on several processes: who they are, which rows each one takes, and what travels between them."""
