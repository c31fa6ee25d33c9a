"""From text to tokens and back.

- `tokenizer`: the public class. `loading`, `gguf_tokenizer`: how it is loaded. `token_table`: the text of each token.
  `calls`: the engine's calls for many tokens.
- `detokenizer`: tokens to text, one at a time. `stop_strings`: where a text ends.
- `chat_input`: messages, checked. `chat_template`: messages to a prompt, in a `sandbox`, within `template_limits`.
  `template_files`: a model's templates. `template_forms`: the forms of a message that a template reads.
"""
