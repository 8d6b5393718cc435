"""Processes and machines of a run. Only this package and `vlmrl doctor` import Ray."""

import os
import secrets

from vlmrl.startup import LOCAL_ADDRESSES

# Ray reads these on import, so they are set before anything here imports it. A cluster that the user started
# (RAY_ADDRESS) has its own settings; a cluster of our own admits only holders of this run's token.
if os.environ.get("RAY_ADDRESS", "") in LOCAL_ADDRESSES:
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Otherwise a late call from a thread, after the end of the session, starts a new Ray.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
# Otherwise Ray kills the process group of a worker that ends, and with it Python's resource tracker before that has
# removed the worker's shared memory. Processes that our workers start end by themselves.
os.environ.setdefault("RAY_process_group_cleanup_enabled", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
