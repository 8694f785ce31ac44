"""What a model's text may be and means: pure functions, used by the HTTP server and by LLM."""
