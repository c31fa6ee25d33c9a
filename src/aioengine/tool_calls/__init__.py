"""Reads tool calls and reasoning out of text, piece by piece, and writes grammars of them. No engine in it.

- `calls`: tools, calls and answers. `formats`: all formats, and how a template shows its format.
- `reading`, `json_scanner`: what readers are made of. `grammars`, `values`: what writers are made of.
- `reasoning`: the part before an answer. `marked_json`, `named_json`, `tagged`, `pythonic`, `gemma4`, `harmony`: a
  kind of format each.
"""
