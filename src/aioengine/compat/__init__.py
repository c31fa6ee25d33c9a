"""vLLM's classes over this engine.

- `llm_engine`: `LLMEngine`. `stat_loggers`: loggers in vLLM's form.
"""
