"""All metrics of runs: the rows of `vlmrl.observe.registry`.

Means are over the sampled tokens of a step unless the meaning says otherwise. After a change run `make metrics`, which
writes the tables of README.md. A meaning is complete by itself: reports show it beside a curve.
"""

from __future__ import annotations

from vlmrl.observe.metric_info import MetricGroup, MetricInfo

_M = MetricInfo
_SCORING = "../rewards/README.md#failures"

_PHASES = {
    "data": "preparing prompts or rows",
    "data_wait": "supervised training: the wait for rows, which are prepared during the update",
    "rollout": "sampling of responses",
    "settle": "asynchronous runs: the wait for requests in flight before a weight sync",
    "reward": "scoring",
    "logprob": "log-probs of the policy and of the reference before the update",
    "teacher": "log-probs of the teacher",
    "value": "value estimates of the critic",
    "update": "the optimizer steps",
    "sync": "sending the weights to the engines",
    "verify_layouts": "check of the layouts",
    "verify_images": "check of the images",
    "verify_noise": "comparison of engine and trainer relative to rounding",
    "verify_again": "asynchronous runs: scoring responses again with the current weights",
    "verify_adapters": "check of the adapters",
    "eval": "evaluation",
    "save": "writing checkpoints and models",
}
"""Phases of a step; each is measured as `time/<phase>_s`."""

_REWARDS = (
    _M(
        "reward/mean",
        "",
        "reward of the scored responses before shaping, rewards of steps and turns included",
        "higher",
    ),
    _M("reward/std", "", "standard deviation of the rewards"),
    _M("reward/shaped_mean", "", "mean reward after shaping: what is trained on", "higher"),
    _M(
        "reward/parts/<source>",
        "",
        "score of a source, unweighted; its further parts are `reward/parts/<source>/<part>`",
    ),
    _M("reward/failed", "count", "responses that could not be scored", "lower", guide=_SCORING),
    _M(
        "reward/failed_infrastructure",
        "count",
        "responses that could not be scored because of the infrastructure; they are in no loss",
        "lower",
        guide=_SCORING,
    ),
    _M(
        "reward/failed_response",
        "count",
        "responses that could not be scored because of what they contain",
        "lower",
        guide=_SCORING,
    ),
    _M(
        "reward/retried_timeouts",
        "count",
        "responses scored a second time, in a new process, after a timeout",
        "lower",
    ),
    _M(
        "reward/retried_deaths",
        "count",
        "responses scored a second time, in a new process, after the end of one",
        "lower",
    ),
    _M(
        "group/constant_fraction",
        "fraction",
        "groups without a learning signal: fewer than two scored responses, or all with the same reward (after "
        "shaping, step rewards included)",
        "lower",
    ),
    _M(
        "response/tokens_mean",
        "tokens",
        "length of the responses; of a conversation, over its turns; without failed episodes",
    ),
    _M("response/tokens_max", "tokens", "length of the longest response"),
    _M(
        "response/truncated_fraction",
        "fraction",
        "responses cut off at `rollout.max_new_tokens`; conversations whose last turn was, or that ended for lack of "
        "turns, context or images",
        "lower",
    ),
    _M("filter/kept_fraction", "fraction", "with dynamic filtering: groups that were kept", "higher"),
    _M("filter/groups_drawn", "count", "with dynamic filtering: groups that were drawn", "lower"),
    _M("filter/reward_mean", "", "`reward/mean` of the kept groups", "higher"),
    _M("filter/reward_std", "", "`reward/std` of the kept groups"),
    _M("filter/tokens_mean", "tokens", "`response/tokens_mean` of the kept groups"),
    _M("filter/truncated_fraction", "fraction", "`response/truncated_fraction` of the kept groups", "lower"),
)

_AGENTS = (
    _M("agent/turns_mean", "count", "responses in an episode, tool calls included"),
    _M("agent/turns_max", "count", "the most responses in an episode"),
    _M("agent/tool_calls", "count", "tool calls, failed ones included"),
    _M("agent/tool_errors", "count", "tool calls that could not be parsed, did not fit the schema or raised", "lower"),
    _M(
        "agent/stop/<reason>",
        "fraction",
        "episodes that ended for this reason: `done`, `turns`, `context`, `images`, `raised`, `failed`",
        guide="../agents/README.md#the-end-of-an-episode",
    ),
    _M("agent/retries", "count", "episodes played again: the environment hung, died or could not begin", "lower"),
    _M("agent/timeouts", "count", "attempts that exceeded a time limit", "lower"),
    _M("agent/failed", "count", "episodes given up after `agent.max_retries`; they are in no loss", "lower"),
    _M(
        "agent/gateway/<count>",
        "count",
        "for agents with `run`: conversations by the reason why they were opened, settings of requests that were not "
        "used, retries that were joined or replayed, replies and tokens that were dropped",
        guide="../agents/gateway/README.md#tokens",
    ),
    _M("agent/env_s", "s", "mean time that the environment took for an episode", "lower"),
    _M("time/env_s", "s", "the longest time that the environment took for an episode", "lower"),
)

_EVALUATION = (
    _M(
        "eval/<set>/pass@<k>",
        "fraction",
        "probability that one of k responses is right, by `math`, else by `exact`, else by a total above 0.5; over "
        "the scored responses",
        "higher",
    ),
    _M("eval/<set>/<value>/pass@1", "fraction", "pass@1 of the rows with this value of `eval.breakdown_key`", "higher"),
    _M("eval/<set>/reward", "", "mean reward", "higher"),
    _M(
        "eval/<set>/loss",
        "nats",
        "supervised training: mean over the responses' tokens; `vlmrl dpo` and reward models: mean over pairs, "
        "single responses or steps",
        "lower",
    ),
    _M(
        "eval/<set>/accuracy",
        "fraction",
        "held-out pairs whose chosen response has the larger reward (`vlmrl dpo`: equal ones counted half), or steps "
        "judged as they are labelled",
        "higher",
    ),
    _M("eval/<set>/margin", "", "`vlmrl dpo`: mean difference of the rewards of held-out pairs", "higher"),
    _M(
        "eval/<set>/calibration_error",
        "fraction",
        "reward models: mean difference of confidence and accuracy",
        "lower",
    ),
    _M("eval/<set>/tokens_mean", "tokens", "length of the responses, without episodes that failed"),
    _M(
        "eval/<set>/truncated_fraction",
        "fraction",
        "responses that were cut off, without episodes that failed",
        "lower",
    ),
    _M("eval/<set>/turns_mean", "count", "with an environment: responses in an episode"),
    _M("eval/<set>/failed", "count", "responses that could not be scored", "lower"),
)

_POLICY = (
    _M("policy/loss", "", "loss, mean over the step's optimizer steps; in RL its level says little"),
    _M("policy/grad_norm", "", "norm of the gradient before clipping"),
    _M("policy/lr", "", "learning rate"),
    _M("policy/aux_loss", "", "load balance loss of experts: the experts per token when all are used evenly"),
    _M("policy/experts_replaced", "fraction", "choices of experts that `algo.routing_replay` replaced by the engine's"),
    _M("policy/entropy", "nats", "entropy of the distribution that is sampled from"),
    _M("policy/clip_fraction", "fraction", "tokens whose loss (CISPO: weight) a clip decided"),
    _M("policy/ratio_max", "", "largest probability ratio to the policy that made the responses"),
    _M("policy/kl_old", "nats", "KL to the policy that made the responses (k3)"),
    _M("policy/kl_loss", "nats", "KL to the reference, as it is in the loss"),
    _M("policy/stopped_early", "", "1 where `algo.kl.early_stop` ended the update"),
    _M("policy/correction_weight", "", "mean weight of the correction"),
    _M("policy/correction_dropped", "fraction", "tokens whose correction weight is 0", "lower"),
    _M(
        "is/ess",
        "fraction",
        "with a correction: effective sample size of its weights, as a share of the tokens",
        "higher",
    ),
    _M("is/mean", "", "mean ratio of the probabilities in trainer and engine, near 1 if both are right"),
    _M("is/clipped", "fraction", "tokens whose ratio is outside the range of the correction", "lower"),
    _M("kl/reference", "nats", "KL to the reference"),
    _M("kl/coef", "", "coefficient of the KL to the reference"),
    _M(
        "distill/kl",
        "nats",
        "estimate of KL(policy, teacher) per sampled token (k1; in asynchronous runs of the samples of older "
        "versions); `vlmrl sft`: the KL over the vocabulary, mean over the responses' tokens",
        "lower",
        guide="../algorithms/README.md#distillation",
    ),
    _M("distill/nll", "nats", "`vlmrl sft` with a teacher: negative log-likelihood of the responses' tokens", "lower"),
    _M("distill/advantage_size", "", "mean absolute value of the teacher's part of the advantages"),
    _M("value/loss", "", "loss of the critic", "lower"),
    _M("value/grad_norm", "", "norm of the critic's gradient before clipping"),
    _M("value/lr", "", "learning rate of the critic"),
    _M("value/mean", "", "mean of the critic's predictions"),
    _M(
        "value/explained_variance",
        "",
        "how much of the returns the critic explains: 1 is all, 0 no more than the mean does",
        "higher",
    ),
    _M("value/clip_fraction", "fraction", "tokens whose value a clip decided"),
)

_REWARD_MODELS = (
    _M("rm/loss", "", "loss of the pairs or steps", "lower"),
    _M("rm/grad_norm", "", "norm of the gradient before clipping"),
    _M("rm/lr", "", "learning rate"),
    _M("rm/aux_loss", "", "load balance loss of a mixture of experts"),
    _M(
        "rm/accuracy",
        "fraction",
        "pairs whose chosen response scores higher; steps judged as they are labelled",
        "higher",
    ),
    _M("rm/difference", "", "pairs: mean difference of the scores of chosen and rejected response", "higher"),
    _M("rm/score", "", "mean of all scores"),
)

_PREFERENCES = (
    _M(
        "dpo/accuracy",
        "fraction",
        "pairs whose chosen response has the larger reward, equal ones counted half",
        "higher",
    ),
    _M("dpo/margin", "", "mean difference of the rewards of chosen and rejected response", "higher"),
    _M(
        "dpo/reward_chosen",
        "",
        "`dpo.beta` times the log-ratio of policy to reference, summed over the chosen response; a mean over its "
        "tokens for `ipo`; without the reference for `orpo` and `simpo`",
        "higher",
    ),
    _M("dpo/reward_rejected", "", "`dpo/reward_chosen`, of the rejected response", "lower"),
    _M("dpo/logprob_chosen", "nats", "log-prob of the chosen response as a whole", "higher"),
    _M(
        "dpo/logprob_rejected",
        "nats",
        "log-prob of the rejected response; that of both sinks when the policy forgets how to respond",
    ),
    _M("dpo/nll", "nats", "mean negative log-prob over the tokens of chosen responses", "lower"),
    _M("dpo/kl", "nats", "`kto`: its baseline, the log-ratio of responses to other prompts"),
    _M("dpo/delta", "", "`bco` and `mpo`: mean reward of all responses before the step"),
)

_GENERATION = (
    _M("generate/rows", "count", "prompts"),
    _M("generate/responses", "count", "responses to the prompts"),
    _M("generate/written", "count", "rows in the file that `generate.keep` makes of them"),
    _M("generate/reward", "", "mean score of the scored responses", "higher"),
    _M("generate/pass@1", "fraction", "correct responses among the scored ones (see `eval/<set>/pass@<k>`)", "higher"),
    _M("generate/failed", "count", "responses that could not be scored", "lower"),
    _M("generate/empty", "count", "responses without text", "lower"),
    _M("generate/tokens_mean", "tokens", "length of the responses"),
    _M("generate/truncated_fraction", "fraction", "responses that were cut off", "lower"),
    _M(
        "generate/tokens_per_s",
        "tokens/s",
        "sampled tokens per second, reading rows and scoring included; without what an earlier run sampled",
        "higher",
    ),
)

_ENGINE = (
    _M("sync/version", "count", "version of the weights that the engines hold"),
    _M(
        "cluster/engine_restarts",
        "count",
        "engines that died and were started again, since the start or the resume of the run",
        "lower",
    ),
    _M("sync/bytes", "bytes", "bytes sent at the weight sync"),
    _M("sync/adapter_bytes", "bytes", "bytes of the adapter that are sent at the weight sync"),
    _M(
        "sync/logprob_diff_mean",
        "nats",
        "mean difference of the log-probs of engine and trainer over the sampled tokens",
        "lower",
        guide="../verify/README.md#log-probs",
    ),
    _M(
        "sync/logprob_diff_max",
        "nats",
        "largest difference of the log-probs of engine and trainer",
        "lower",
        guide="../verify/README.md#log-probs",
    ),
    _M("sync/kl_rollout_train", "nats", "KL(engine, trainer), k3", "lower"),
    _M("sync/readback_layers", "count", "layers of an engine that were read back after the sync"),
    _M("sync/readback_unread", "count", "tensors not read back (quantised layers, experts in FlashInfer's layout)"),
    _M("sync/readback_s", "s", "time of the read-back", "lower"),
    _M(
        "async/staleness_mean",
        "count",
        "asynchronous runs: how many weight syncs ago a token was sampled, over all sampled tokens",
        "lower",
        guide="../trainer/README.md",
    ),
    _M("async/staleness_max", "count", "how many weight syncs ago the oldest token was sampled", "lower"),
    _M("async/mixed_fraction", "fraction", "responses with tokens of several versions"),
    _M("async/groups_ahead", "count", "groups that were finished and not yet trained on when the step had its own"),
    _M(
        "verify/noise/level",
        "nats",
        "effect of rounding on a log-prob, on average, measured on a few responses of the first step, of every "
        "tenth, and as soon as `verify/noise/gap` outgrows it",
    ),
    _M("verify/noise/gap", "nats", "mean difference of engine and trainer on a few responses of each step", "lower"),
    _M("verify/noise/layout_gap", "nats", "where noise is measured: the run's layout against `padded`", "lower"),
    _M("verify/noise/decode_gap", "nats", "where noise is measured: the engine's decode against its prefill", "lower"),
    _M("verify/adapters/gap", "nats", "mean difference of engine and trainer with the adapter on", "lower"),
    _M("verify/adapters/base_gap", "nats", "mean difference of engine and trainer with the adapter off", "lower"),
    _M("verify/adapters/effect", "nats", "effect of the adapter on a log-prob, by the trainer"),
    _M(
        "verify/adapters/doubts",
        "count",
        "engines whose responses looked wrong in the adapter check at first, and were checked again",
        "lower",
    ),
    _M(
        "verify/layouts/values_gap",
        "",
        "first step: how far values of `shared` and `packed` are from `padded` on the first layers, relative",
        "lower",
    ),
    _M(
        "verify/layouts/gradients_gap",
        "",
        "first step: how far gradients of `shared` and `packed` are from `padded`, relative",
        "lower",
    ),
    _M(
        "verify/images/<path>_effect",
        "nats",
        "image check: change of a log-prob under other images, for each path that scores",
    ),
    _M("verify/images/<path>_gap", "nats", "image check: difference from the rollouts with the true images", "lower"),
)

_DATA = (
    _M("data/rows_dropped", "count", "rows that could not be used, since the start", "lower"),
    _M(
        "data/rows_cut",
        "count",
        "`sft`: rows of the step that were cut to `data.max_len` (`data.truncate_enable`)",
        "lower",
    ),
    _M("data/left_out", "count", "prompts at the end of the data that fill no batch"),
    _M("media/bytes_moved", "bytes", "bytes of decoded images put into memory shared between processes"),
    _M("batch/tokens", "tokens", "tokens of all samples of the step, prompts included"),
    _M("pack/tokens", "tokens", "tokens that the training pass computed"),
    _M("pack/padding_fraction", "fraction", "padding in the training pass", "lower"),
    _M("pack/shared_fraction", "fraction", "tokens that `shared` did not have to compute", "higher"),
    _M("vision/tower_calls", "count", "images that went through a vision tower", "lower"),
    _M("vision/cache_hits", "count", "images whose features came from the cache instead", "higher"),
)

_TIMES = (
    _M("time/step_s", "s", "duration of the step", "lower"),
    _M("throughput/tokens_per_s", "tokens/s", "`batch/tokens` per second of the step", "higher"),
    *(_M(f"time/{phase}_s", "s", meaning, "lower") for phase, meaning in _PHASES.items()),
    _M("time/start/checks_s", "s", "in the first record: the checks, from the start of the program", "lower"),
    _M("time/start/ray_s", "s", "in the first record: the start of Ray", "lower"),
    _M("time/start/roles_s", "s", "in the first record: the start of all roles", "lower"),
)

GROUPS = (
    MetricGroup("Rewards and responses", _REWARDS),
    MetricGroup("Environments", _AGENTS),
    MetricGroup("Evaluation", _EVALUATION),
    MetricGroup("Policy, critic and reference", _POLICY),
    MetricGroup("Reward models", _REWARD_MODELS),
    MetricGroup("Preferences", _PREFERENCES),
    MetricGroup("Batch generation", _GENERATION),
    MetricGroup("Engine and trainer", _ENGINE),
    MetricGroup("Data and batches", _DATA),
    MetricGroup("Time", _TIMES),
)
