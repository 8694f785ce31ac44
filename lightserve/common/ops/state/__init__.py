"""Ops with recurrent state: what a layer keeps of a request has one size, however many tokens it has read."""
