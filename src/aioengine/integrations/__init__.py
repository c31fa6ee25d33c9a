"""The engine behind other projects' interfaces: the official OpenAI client, and the LM evaluation harness.

Each module needs a package of its own, which its error names where it is missing.
"""
