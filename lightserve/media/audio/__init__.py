"""Sounds of requests: files, samples and their features."""
