"""vLLM's `LLMEngine` and its loggers of statistics, over the engine of this package."""
