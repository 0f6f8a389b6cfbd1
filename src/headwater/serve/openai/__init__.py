"""The OpenAI API: completions, chat completions, models."""
