"""The package of a vendor whose hardware does not exist: what a real one needs, and nothing of LightServe's own.

Its tensors are in host memory, but it has a name, operators, a weight layout, a collective library, graphs and copies
of its own. ``install.py`` makes it look installed by pip.
"""
