"""OpenAI's /v1/audio: speech to text."""
