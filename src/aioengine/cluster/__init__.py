"""Several engines behind one, see docs/internals."""
