"""Text to calls, content and reasoning, piece by piece, and calls to grammars; no engine in it.

`calls`: tools and answers. `reading`, `json_scanner`: what parsers are made of; `grammars`, `values`: likewise. A file
a kind of format (`marked_json`, `harmony`, …), and all in `formats`; `reasoning` before the rest.
"""
