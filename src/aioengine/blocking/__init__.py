"""`LLM`: blocking calls from any thread to an engine on a loop in a thread of its own.

- `llm`: the public class. `facade`: the calls that it shares with vLLM's form of it.
- `loop_thread`: the thread, its loop, and what happens when either ends.
"""
