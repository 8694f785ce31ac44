"""Programs for people who add models."""
