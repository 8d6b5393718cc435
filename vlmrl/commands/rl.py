"""`vlmrl rl`: reinforcement learning, from the settings to the model at the end."""

from __future__ import annotations

from functools import partial

from vlmrl.cluster.sync_plan import format_sync
from vlmrl.commands.checks import Checks, adapter_check, image_check, noise_check
from vlmrl.commands.preflight import check_data, plan_of, plan_of_critic
from vlmrl.commands.run import begin, prepare, started
from vlmrl.config.run import RlConfig
from vlmrl.config.schedule import check_steps, last_step_from
from vlmrl.errors import RewardError
from vlmrl.observe.transcripts import Transcripts
from vlmrl.trainer.checkpoints import Saves
from vlmrl.trainer.evaluation import Evaluations, named
from vlmrl.trainer.experience import Judged
from vlmrl.trainer.rl import Carried, Course, train
from vlmrl.types import Metrics
from vlmrl.verify.adapters import format_check


def train_rl(config: RlConfig, *, dry_run: bool = False) -> None:
    """`vlmrl rl`."""
    folder, tools, warnings = prepare(config, dry_run=dry_run)
    adapter, critics = plan_of(config, tools), plan_of_critic(config)
    if dry_run:
        return check_data(config, adapter)
    with started(config, folder, warnings, adapter) as (builder, report):
        prompts = builder.prompts(config, report.say)
        check_steps(config, prompts.num_rows)
        sets = named(prompts.evaluation())  # before engines start: its rows are checked like those of training
        engines, policy, weight_sync, reference, critic, reward_sources = builder.roles(
            config, tools, adapter=adapter, critics=critics, num_rows=prompts.num_rows, report=report
        )
        saves = Saves(config, folder, prompts, policy, report, critic)
        done, carried = saves.restore()
        last = last_step_from(config, prompts.num_rows, done=done, drawn=saves.drawn)
        saves.look_ahead(done=done, last=last)
        begin(config, report, folder, policy, last=last, done=done)
        course = Course(prompts.num_rows * config.train.num_episodes, drawn=saves.drawn)
        transcripts = Transcripts(folder.rollouts, prompts.save_media)
        evaluations = Evaluations(config, sets, engines, reward_sources, policy, transcripts, saves, report, last=last)
        weight_sync.sync(done)
        checks = Checks(
            report,
            policy,
            images=image_check(config, engines, policy, reference, critic, reward_sources),
            noise=noise_check(config, engines, policy, on_gpu=builder.machines.has_gpus, say=report.say),
            adapters=adapter_check(config, tools, engines, policy, adapter),
            first_step=done + 1,
        )

        def after_step(step: int, judged: Judged) -> Metrics:
            if config.logger.rollouts:
                advantages = judged.experience.advantages
                transcripts.write(
                    step, judged.groups, judged.scores, judged.rewards, advantages, left_out=judged.left_out
                )
            return evaluations.after(step)

        if adapter is not None:
            report.say(format_sync(adapter, ds=config.ds, vllm=config.vllm))
            report.say(format_check(checks.published(done)))
        builder.stack.enter_context(saves.kept())
        if done == 0 or saves.owes_evaluation:
            report.evaluation(done, evaluations.at(done))
        try:
            ending = train(
                config,
                prompts=prompts,
                engine=engines,
                rewarder=reward_sources,
                policy=policy,
                weight_sync=weight_sync,
                reference=reference,
                critic=critic,
                report=report,
                check_responses=checks.responses,
                check_publish=checks.published,
                after_step=after_step,
                save=partial(evaluations.save, has_adapter=adapter is not None),
                first_step=done + 1,
                last_step=last,
                course=course,
                carried=carried or Carried(config.algo.kl.init_coef),
            )
        except RewardError as error:
            raise evaluations.stopped(error) from None
        evaluations.end(ending, has_adapter=adapter is not None)
        saves.finish(has_adapter=adapter is not None)
