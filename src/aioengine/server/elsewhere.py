"""Paths of other servers and of the OpenAI API that are not here, with what is here in their place."""

from __future__ import annotations

import re

COMPACT_PATH = "/v1/responses/compact"
MAX_CHARS = 256
"""Most characters of a path that are looked at: searching a pattern may take time by the square of them."""

ELSEWHERE = tuple((re.compile(paths), told) for paths, told in (
    (r"/api/(chat|ps|show|tags|version|generate|embed|embeddings|pull|create|copy|delete|push)|/api/blobs/.*",
     "that is Ollama's API, and here is OpenAI's: /v1/chat/completions, /v1/completions and /v1/models"),
    (r"/v1.*/.+:((streamG|g)enerate|(batchE|e)mbed|count|predict)[A-Za-z]*|/(upload/)?v1(alpha|beta).*",
     "that is Gemini's API, and here is OpenAI's: use /v1/chat/completions"),
    (r"/(v1|v2)/chat", "that is Cohere's API, and here is OpenAI's: use /v1/chat/completions"),
    (r"/model/.+/(converse|invoke).*", "that is Bedrock's API, and here is OpenAI's: use /v1/chat/completions"),
    (r"/openai(/.*)?", "take /openai and the deployment out of the base URL: /v1/chat/completions is here"),
    (r"/generate(_stream)?|/completion|/infill|/invocations|/v1/complete|/v1/engines/.+",
     "use /v1/completions, or /v1/chat/completions"),
    (r"/info|/props|/slots|/get_model_info|/model_info|/get_server_info|/server_info",
     "use /v1/models, /load and /metrics"),
    (r"(/v1|/v2)?/(embed|embeddings?|embed_all|pooling|classify|score|rerank)|/v1/engines/.+/embeddings",
     "it needs an embedding model, or one that scores or classifies, and this server's language model generates text"),
    (r"/v1/(moderations|audio/.+|images/.+|videos(/.*)?|realtime(/.*)?)",
     "this server generates text; use another one for that"),
    (r"/v1/(files|uploads|vector_stores|containers|assistants|threads|evals|fine_tuning)(/.*)?",
     "nothing is kept here but responses (/v1/responses): send texts and tools with each request"),
    (r"/v1/(messages/)?batches(/.*)?", "send its requests one by one: the engine computes them together"),
    (r"/v1/responses/.+/cancel", "close the connection of the response, or use /abort"),
    (r"/v1/conversations(/.*)?", "give the previous_response_id of /v1/responses, or the whole conversation"),
    (COMPACT_PATH, "leave messages out of the input instead"),
    (r"/v1/(un)?load_lora_adapter", "this server has no adapters"),
))  # fmt: skip
"""Paths of other servers and of the OpenAI API, with what is here in their place; the first that fits counts."""


def instead_of(path: str) -> str | None:
    """Name what is here in the place of another server's path; None: no other server is known to have the path."""
    return next((told for paths, told in ELSEWHERE if paths.fullmatch(path[:MAX_CHARS])), None)
