"""A single trainer rank: take optimizer steps on synthetic samples and print the peak memory.

    python memory_rank.py MODEL '{"role": "critic", "ds": {"zero_stage": 2}}'

The role is actor, critic, or both: an actor with its critic in one process.

The peak is the process's resident memory minus that after its imports. The caller makes glibc return freed memory
immediately (MALLOC_MMAP_THRESHOLD_), so that memory cached by the C library is not counted.
"""

import json
import sys
from dataclasses import replace
from typing import Any

from vlmrl import startup

startup.prepare()

import bitsandbytes  # noqa: E402, F401 - its import does not count as the rank's memory
import numpy as np  # noqa: E402
import peft  # noqa: E402, F401
import torch  # noqa: E402

from vlmrl.cluster.models import loss_totals, pack_experience  # noqa: E402
from vlmrl.commands.bench.memory import peak_bytes  # noqa: E402
from vlmrl.commands.bench.samples import make_samples, random_experience  # noqa: E402
from vlmrl.config.actor import Model  # noqa: E402
from vlmrl.config.bench import SyntheticBatch  # noqa: E402
from vlmrl.config.critic import Critic  # noqa: E402
from vlmrl.config.data import Columns  # noqa: E402
from vlmrl.config.ds import Ds  # noqa: E402
from vlmrl.config.train import Loop  # noqa: E402
from vlmrl.config.vision import Vision  # noqa: E402
from vlmrl.data.balance import spread  # noqa: E402
from vlmrl.learning import critic as learning_critic  # noqa: E402
from vlmrl.learning.policy import Policy, PolicyLoss  # noqa: E402
from vlmrl.learning.policy_and_critic import PolicyAndCritic  # noqa: E402
from vlmrl.learning.settings import CriticSettings, PolicyAndCriticSettings, PolicySettings  # noqa: E402
from vlmrl.models.adapter_plan import plan_adapter  # noqa: E402
from vlmrl.models.load import skeleton  # noqa: E402
from vlmrl.models.memory import colocated_critic, trainer_memory  # noqa: E402
from vlmrl.models.sizes import model_sizes, with_value_head  # noqa: E402
from vlmrl.plugins import processor_of  # noqa: E402

PROMPT, ANSWER, IMAGE = 320, 704, 224


def main(path: str, case: dict[str, Any]) -> None:
    """Take two steps of two packs with one sample each: the second starts with optimizer state and a gradient."""
    ds, columns, role = Ds.model_validate({"param_dtype": "fp32", **case["ds"]}), Columns(), case.get("role", "actor")
    checkpointing = {"gradient_checkpointing_enable": case.get("checkpointing", False)}
    thawed = {"freeze_visual_encoder": False, "freeze_projector": False}
    actor = Model(model_name_or_path=path, **checkpointing, **thawed)
    critic = Critic(model_name_or_path=path, zero_stage=ds.zero_stage, **checkpointing, **thawed)
    reader = processor_of(path, columns)
    adapter = plan_adapter(actor, ds.lora, reader)
    size = model_sizes(skeleton(path), reader.parameter_group)
    has_images = reader.resize_factor is not None
    shapes = SyntheticBatch(
        groups=2,
        n_samples_per_prompt=1,
        prompt_tokens=PROMPT,
        response_tokens=(ANSWER,),
        image_size=IMAGE if has_images else 0,
    )
    samples = make_samples(reader, size.vocabulary, shapes, seed=0)
    packs = spread(
        samples,
        num_ranks=1,
        layout="padded",
        max_tokens=PROMPT + ANSWER,
        max_samples=1,
        image_cost=lambda image: 0.0,
        filler=reader.dummy_sample(),
    )[0]
    zeros = [np.zeros(len(sample.tokens), np.float32) for sample in samples]
    experience = replace(random_experience(samples, zeros, seed=0), values=zeros, returns=zeros)
    work = [[(pack, pack_experience(pack, experience)) for pack in packs]], [loss_totals(experience.samples)]
    common = {"ds": ds, "loop": Loop(layout="padded"), "columns": columns, "vision": Vision(cache_gib=0.0)}
    common |= {"total_steps": 2, "adapter": adapter}
    loss = PolicyLoss(aggregation="token", max_tokens=ANSWER)
    of_policy = {"actor": actor, "loss": loss, "temperature": 1.0, "bans": True, **common}
    of_critic = {"critic": critic, **common}

    def train() -> None:
        if role == "actor":
            updates = [Policy(PolicySettings(**of_policy)).update]
        elif role == "critic":
            updates = [learning_critic.Critic(CriticSettings(**of_critic)).update_values]
        else:
            both = PolicyAndCriticSettings(policy=PolicySettings(**of_policy), critic=CriticSettings(**of_critic))
            pair = PolicyAndCritic(both)
            updates = [pair.update_values, pair.update]
        for _ in range(2):
            for update in updates:
                update(*work)

    measured = peak_bytes(train, torch.device("cpu"))
    patches = max(sum(int(np.prod(reader.grid(m.size))) for m in pack.media.values()) for pack in packs)
    where = {"ds": ds, "adapter": adapter, "ranks": 1, "tokens": PROMPT + ANSWER, "patches": patches, "device": "cpu"}
    roles = [trainer_memory(size, model=actor, **where)] if role != "critic" else []
    if role != "actor":
        valued = trainer_memory(with_value_head(size), role="critic", model=critic.as_model, **where)
        roles.append(colocated_critic(roles[0], valued, shares_features=False) if roles else valued)
    estimated = {f"{one.name}: {part.name}": part.num_bytes for one in roles for part in one.parts}
    print(json.dumps({"measured": measured, "estimated": sum(estimated.values()), "parts": estimated}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
