"""An LLM engine inside your process that computes what chat prompts share once."""

__version__ = "0.1.0"
