"""Constraints.

`constraints`: as requests hold them, and what callers give. `guidance` compiles them by llguidance; `normalize` puts a
JSON schema in the keywords that it enforces (`options`: which of several have no value in common), and `json_schema`
finds what it would get wrong. `trials`: those that may take long to compile, in a process first (`trial`). `forced`:
how much text a constraint alone may determine. `grammar`: what a compiled one is, and reasoning before it. `rows`: the
rows of a device that have one.
"""
