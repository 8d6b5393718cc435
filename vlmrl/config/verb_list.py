"""All verbs of the command line."""

from vlmrl.config import bench_verbs as bench
from vlmrl.config.plan import PlanConfig
from vlmrl.config.push import PushConfig
from vlmrl.config.report import ReportConfig
from vlmrl.config.serving import PolicyServeConfig, ServeConfig
from vlmrl.config.stages import DpoConfig, RmConfig, SftConfig
from vlmrl.config.verb_base import VerbConfig
from vlmrl.config.verbs import EvalConfig, GenerateConfig, MergeConfig, RlConfig

VERBS: tuple[type[VerbConfig], ...] = (
    *(RlConfig, SftConfig, RmConfig, DpoConfig, EvalConfig, GenerateConfig, MergeConfig, PushConfig, PolicyServeConfig),
    *(ServeConfig, ReportConfig, PlanConfig),
    *(bench.SyncBench, bench.RolloutBench, bench.AgentsBench, bench.AsyncBench),
    *(bench.StepBench, bench.SftBench, bench.DpoBench, bench.LogprobsBench),
)
