"""Moves blocks of KV from the workers of one engine to those of another. ``base.py`` says what a transfer backend must
offer."""
