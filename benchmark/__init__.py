"""Benchmarks for developers, one file a question: ``python -m benchmark.engine.static``. They are not in the wheel."""
