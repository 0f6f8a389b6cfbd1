"""The engine: scheduler, runner and text in one loop; its process and its client; ``LLM``."""
