"""All verbs of the command line."""

from vlmrl.config.bench_verbs import AgentsBench, AsyncBench, LogprobsBench, RolloutBench, StepBench, SyncBench
from vlmrl.config.stages import RmConfig, SftConfig
from vlmrl.config.verb_base import VerbConfig
from vlmrl.config.verbs import EvalConfig, MergeConfig, PolicyServeConfig, RlConfig, ServeConfig

VERBS: tuple[type[VerbConfig], ...] = (
    *(RlConfig, SftConfig, RmConfig, EvalConfig, MergeConfig, PolicyServeConfig, ServeConfig),
    *(SyncBench, RolloutBench, AgentsBench, AsyncBench, StepBench, LogprobsBench),
)
