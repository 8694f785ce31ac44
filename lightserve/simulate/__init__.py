"""Run the real scheduler against a cost model of a GPU on a virtual clock, to compare policies and limits.

It uses neither processes nor torch. A step takes as long as the cost model says. Every policy gets the same requests.
"""
