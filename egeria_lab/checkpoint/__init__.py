"""Checkpoints on disk: a file format that cannot run anything, written so that a kill at any byte loses nothing."""
