"""The core in a process of its own, see docs/internals."""
