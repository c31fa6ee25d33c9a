"""From logits to tokens, by operations.

- `sampler`: rules, temperature, filters, draw, log-probabilities. `rules`: edits of logits as tables.
- `processors`: the caller's own. `processed`: log-probabilities after all changes. `outputs`: the words that come back.
"""
