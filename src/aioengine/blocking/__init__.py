"""The engine for scripts that do not know asyncio: `aioengine.LLM` and `aioengine.LLMEngine`, in vLLM's names."""
