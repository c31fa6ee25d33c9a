"""A plugin that cannot be imported."""

raise ValueError("this plugin was made for another version")
