"""An LLM inference engine that lives inside an asyncio program."""

__version__ = "0.1.0"
