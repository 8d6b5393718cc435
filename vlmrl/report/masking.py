"""Keep secrets out of the page: those of the environment, and those in URLs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from vlmrl.system.environment_variables import secret_values

MASK = "•••"
_USER = re.compile(r"(?<=://)[^/\s@\"'<>]+@")
_PARAMETER = re.compile(
    r"(?i)([?&;](?:[\w-]*(?:key|token|secret|password|passwd|auth|sig|signature|credential)[\w-]*)=)[^&\s#\"'<>;]+"
)


def mask_urls(text: str) -> str:
    """Replace user and password, and parameters that look like keys, in all URLs of a text."""
    return _PARAMETER.sub(rf"\1{MASK}", _USER.sub(f"{MASK}@", text))


def mask_values(page: str, environment: Mapping[str, str]) -> str:
    """Replace the values of environment variables that hold secrets, in a JSON text."""
    for value in secret_values(environment):
        for form in {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}:
            page = page.replace(form, MASK)
    return page
