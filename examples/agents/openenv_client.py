"""An environment of an OpenEnv server, in a container or on another machine.

    pip install openenv-core
    export OPENENV_URL=http://localhost:8000
    vlmrl rl --train.agent_func_path examples/agents/openenv_client.py:make ...

For another environment, copy this file, and change how a response becomes an action, and an observation text and
images. Its methods are asynchronous: hundreds of episodes share a process, and each has a session at the server.
"""

import base64
import io
import json
import os

from PIL import Image

from vlmrl.agents import Reply


class OpenEnv:
    """A session. An action is `{field: response}`."""

    def __init__(self, url, field="message"):
        try:
            from openenv.core import GenericEnvClient
        except ImportError as error:
            raise ImportError("OpenEnv's client is not installed: pip install openenv-core") from error
        self.client, self.field = GenericEnvClient(base_url=url), field

    async def reset(self, seed):
        result = await self.client.reset(seed=seed)
        return content(result.observation)

    async def step(self, response):
        result = await self.client.step({self.field: response})
        return Reply(content(result.observation), result.reward or 0.0, result.done)

    async def close(self):
        await self.client.close()


def content(observation):
    """The images of an observation, which servers send as base64 in `image`, and the rest of it as JSON."""
    rest = dict(observation)
    image = rest.pop("image", None)
    parts = [] if image is None else [Image.open(io.BytesIO(base64.b64decode(image)))]
    return [*parts, json.dumps(rest, ensure_ascii=False)]


def make():
    return OpenEnv(os.environ.get("OPENENV_URL", "http://localhost:8000"))
