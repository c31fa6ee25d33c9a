"""Logits to tokens: rules, filters, and draws that depend on nothing but the request.

| module | what it does |
|---|---|
| `sampling` | `sample`: the order of it all |
| `rows` | what has to be known of each row |
| `rules`, `processors`, `penalties` | what a request forbids or favours |
| `blocks`, `filters`, `noise`, `draws` | logits → tokens |
| `logprobs` | of sampled tokens and of prompt tokens |

A draw is a function of (seed, choice, output position) and the row's logits, and those of its model, its tokens and its
rules: never of the batch, the row, preemption or the device.
"""
