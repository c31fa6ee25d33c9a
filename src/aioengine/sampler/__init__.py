"""Logits to tokens: rules, filters, and draws that depend on nothing but the request.

| module | what it does |
|---|---|
| `sampler` | `Sampler.sample`: the order of it all, by operations |
| `rules` | what requests forbid or favour, as tables for the device |
| `processors` | the functions over logits that requests brought along, on the host |
| `outputs` | what a step brings back, as words |

A draw is a function of (seed, choice, output position) and the row's logits, and those of its model, its tokens and its
rules: never of the batch, the row, preemption or the device.
"""
