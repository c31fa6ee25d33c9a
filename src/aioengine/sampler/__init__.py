"""`sampler`: logits → rules → temperature → filters → draw → log-probabilities, by operations; `rules` as tables;
`processors`; `processed` log-probabilities; `outputs`.
"""
