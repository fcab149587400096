"""Switchyard: one OpenAI-compatible endpoint in front of your own GPUs, on Ray Serve and vLLM."""

__version__ = "0.1.0"
