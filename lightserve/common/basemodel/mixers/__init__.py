"""Recurrent mixers: what a layer may have instead of attention. One file a kind, and a field of ``LayerSpec``."""
