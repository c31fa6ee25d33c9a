"""The package's version, for it and for its build."""

__version__ = "0.1.0"
