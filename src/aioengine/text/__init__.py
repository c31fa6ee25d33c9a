"""`tokenizer` (`loading`, `gguf_tokenizer`, `token_table`), `detokenizer`, `stop_strings`, `template_files` (a
model's chat templates by name), `chat_input` and `chat_template` (in a counted `sandbox`, within `template_limits`;
`template_forms`: which forms of a message a template reads).
"""
