"""`model`: what an executor asks of one, as a protocol.

`families` (as a table), `decoder_config` (config.json as what the decoder must know), `decoder`, `implementations`:
which of the two a model takes, the decoder or transformers' code (`transformers/`: `transformers_config` probes how
that attends, `transformers_model` has our attention behind it), `loader` (a checkpoint's tensors, streamed), `formats/`
(what its files hold: `catalogue`, of `stored` tensors; `quantised` formats; of GGUF `gguf_file` reads headers and
vocabularies, `gguf_families` says them in transformers' words, `gguf_tensors` reads values), `checkpoint` (where a
tensor lies in one), `folder` (a model's small files, or its GGUF file), `no_model` (why a folder or a file is no
model), `demo/` (the bundled model).
"""
