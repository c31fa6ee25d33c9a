"""`LLM`: blocking calls from any thread to an engine on a loop in a thread of its own."""
