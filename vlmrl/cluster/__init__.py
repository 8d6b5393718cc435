"""Processes and machines. The only door to Ray."""

import os
import secrets

# Ray reads these when it is imported, so they are set before anything here imports it. A cluster that the user started
# (RAY_ADDRESS) has its own settings; one of our own lets in only who holds this run's token.
if "RAY_ADDRESS" not in os.environ:
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
