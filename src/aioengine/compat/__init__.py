"""vLLM's `LLMEngine` (`llm_engine`), and `stat_loggers` of its form."""
