"""Checks during a run: engine and trainer agree, engines apply the adapter, layouts agree, models depend on images.

The arrival of weights is checked in `cluster/weight_sync.py` and `rollout/readback.py`.
"""
