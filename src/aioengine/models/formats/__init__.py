"""Formats of checkpoints: what a model's files hold, as tensors under the names that transformers saves them by."""
