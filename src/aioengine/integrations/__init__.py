"""The engine behind other projects' interfaces.

- `openai_client`: OpenAI's own clients, over `in_process`, an exchange without sockets.
- `lm_eval`: a model of the LM evaluation harness. `ray_serve`: a deployment of Ray Serve.
"""
