"""From a model's files to a forward pass.

- `model`: the interface of a model, and the context of a step. `decoder`: one decoder for all native families.
- `families`: the families as a table. `decoder_config`: config.json as the decoder needs it.
- `implementations`: whether a model runs by the decoder or by transformers' code (`transformers/`).
- `folder`: a model's small files. `no_model`: why a folder is none. `checkpoint`: where a tensor lies. `loader`:
  reads weights. `saver`: writes them. `formats/`: safetensors, quantised formats and GGUF.
- `demo/`: the bundled model.
"""
