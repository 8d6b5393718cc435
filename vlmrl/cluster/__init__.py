"""Processes and machines. The only door to Ray."""

import os
import secrets

OF_OUR_OWN = ("", "local")
"""Values of RAY_ADDRESS that name no cluster: a run starts its own. `local` is Ray's word for it."""

# Ray reads these when it is imported, so they are set before anything here imports it. A cluster that the user started
# (RAY_ADDRESS) has its own settings; one of our own lets in only who holds this run's token.
if os.environ.get("RAY_ADDRESS", "") in OF_OUR_OWN:
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Else a call that comes after the end of the session, from a thread that has not heard of it, starts a new Ray.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
# Ray kills the process group of a worker that ends, and Python's resource tracker in it before it has removed what the
# worker held in shared memory. What our workers start ends by itself.
os.environ.setdefault("RAY_process_group_cleanup_enabled", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
