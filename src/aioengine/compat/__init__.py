"""vLLM's `LLMEngine`, over the engine of this package."""
