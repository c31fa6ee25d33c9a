"""Constraints on an answer's text.

- `constraints`: as requests hold them. `guidance`: compiles them by llguidance. `grammar`: the interface of a compiled
  one, and reasoning before it. `rows`: the rows of a device that have one.
- `normalize`: a JSON schema in the keywords that llguidance enforces (`options`: whether alternatives exclude each
  other). `json_schema`: schemas that it would enforce wrongly, which are refused.
- `forced`: how much text a constraint may determine alone. `trials`: constraints that may take long compile in a
  process first (`trial`).
"""
