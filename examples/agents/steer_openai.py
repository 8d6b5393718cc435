"""The game of steer.py, played by an agent with a client of its own: any program that speaks OpenAI's chat completions.

vlmrl rl --train.agent_func_path examples/agents/steer_openai.py ...
"""

import base64
import io
import sys
from pathlib import Path

from openai import AsyncOpenAI

sys.path.insert(0, str(Path(__file__).parent))

from steer import make_small


async def run(task):
    game, messages = make_small(), []
    shown = game.reset(task.seed)
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        while True:
            messages.append({"role": "user", "content": [part(shown_part) for shown_part in shown]})
            completion = await client.chat.completions.create(model=task.model, messages=messages)
            messages.append(completion.choices[0].message)
            reply = game.step(completion.choices[0].message.content)
            if reply.done:
                return reply.reward
            shown = reply.content


def part(shown):
    if isinstance(shown, str):
        return {"type": "text", "text": shown}
    png = io.BytesIO()
    shown.save(png, "PNG")
    url = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}
