"""The engine behind other projects' interfaces.

`in_process`: an `Exchange` whose client is an object on the same loop; `openai_client`: the official clients over it;
`lm_eval`: a model of the evaluation harness; `ray_serve`: a deployment of Ray Serve.
"""
