"""The real scheduler against a model of a GPU, on a virtual clock: what a policy or a limit does, in seconds.

There are no processes and no torch; a step takes as long as the cost model says. Every policy meets the same requests.
"""
