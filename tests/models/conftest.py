"""Checkpoints to load."""

from checkpoints import checkpoint as checkpoint
