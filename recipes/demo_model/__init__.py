"""The recipe of the bundled demo model: a tiny Llama that tells little stories and chats about a closed world.

`demo_model.train` makes it from nothing and `demo_model.evaluate` measures it; run them in this folder's parent. The
model itself lies in ``src/aioengine/models/demo``.
"""
