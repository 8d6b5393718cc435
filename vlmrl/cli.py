"""The command line. Heavy libraries are imported only after the arguments are parsed."""

import difflib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from vlmrl import __version__, startup
from vlmrl.commands.exit_code import exit_code
from vlmrl.config.built_in import ESTIMATORS, POLICY_LOSSES
from vlmrl.errors import ConfigError
from vlmrl.system.exits import end_process
from vlmrl.system.fork_server import fork_server
from vlmrl.system.scratch import scratch
from vlmrl.system.stops import handle_signals

if TYPE_CHECKING:
    from vlmrl.config.verb_base import VerbConfig

Config = TypeVar("Config", bound="VerbConfig")

_HELP = """\
usage: vlmrl VERB [--config FILE.yaml ...] [--section.setting VALUE ...]

Reinforcement learning of language and vision-language models.

  rl             reinforcement learning: sample responses, score them, learn from the better ones
  sft            supervised fine-tuning on the labels of a dataset
  rm             training of a reward model on preferences, or on labelled steps
  dpo            learning from preferences among responses, without sampling: DPO, IPO, KTO, ORPO, SimPO, BCO, MPO
  eval           evaluation on held-out prompts, scored by the reward functions
  generate       responses to the rows of a dataset, as rows for sft and for preferences
  bench sync     throughput of weight sync from the trainer to the engines
  bench rollout  throughput of the engines
  bench agents   throughput of conversations with environments, and of the same tokens without them
  bench async    seconds per step of synchronous and asynchronous runs, in turn
  bench step     time, FLOPs and memory of an optimizer step in each layout
  bench sft      time of an optimizer step of supervised training, packed and padded
  bench dpo      the same of a step of DPO, whose pairs share their prompts or not
  bench logprobs time and memory of log-probs with and without [T, V] logits
  serve          serve a model to agents, by OpenAI's chat completions
  serve-rm       reward server: scores responses over HTTP, by a reward model or by your own function
  report         one page to look at of runs: curves, responses beside their images, checks, settings
  merge          merge an adapter into its base, as a complete model
  push           upload a run's model to the Hugging Face Hub, with its model card
  plan           a placement of an RL run on GPUs: memory, estimated step time by phase, settings as YAML
  doctor         report what this machine has, what works on it, and how to fix what does not;
                 with --self-test: check it with tiny models, in about two minutes;
                 with --config FILE.yaml: estimate the memory of a run's roles, and whether they fit

`vlmrl VERB --help` lists the verb's settings. `--dry-run` on rl, sft, rm, dpo, eval and generate checks them and prints
the plan; on push it lists the files. `--quiet` prints only warnings, errors and results of a run.
"""

_GRACE_S = 60.0
"""The default of `train.stop_grace_s`, for verbs that do not have the setting."""

_RL_WITH = "vlmrl rl does it, with --algo.advantage.estimator"
_ELSEWHERE = {
    **{name: f"vlmrl rl does it, with --actor.policy_loss_type {name}" for name in POLICY_LOSSES},
    **{name: f"{_RL_WITH} {name}" for name in ESTIMATORS},
    "train": "vlmrl rl learns from rewards, vlmrl sft from responses, vlmrl dpo from preferences",
    "grpo": f"{_RL_WITH} group_norm, its default",
    "ppo": f"{_RL_WITH} gae",
    **{f"train_ppo{end}": f"{_RL_WITH} gae" for end in ("", "_ray")},
    "dapo": f"{_RL_WITH} group_norm, --algo.dynamic_filtering_enable and --actor.eps_clip_low_high 0.2 0.28",
    **dict.fromkeys(("train_sft", "finetune", "fine-tune"), "vlmrl sft does it"),
    **dict.fromkeys(("train_rm", "reward"), "vlmrl rm does it"),
    "train_prm": "vlmrl rm does it, with --rm.kind process",
    "train_dpo": "vlmrl dpo does it",
    **{name: f"vlmrl dpo does it, with --dpo.loss {name}" for name in ("ipo", "kto", "orpo", "simpo", "bco", "mpo")},
    "evaluate": "vlmrl eval does it",
    **dict.fromkeys(("view", "show", "dashboard", "ui"), "vlmrl report does it"),
    "batch_inference": "vlmrl generate does it",
    **dict.fromkeys(("serve_rm", "serve-reward"), "vlmrl serve-rm does it"),
    **dict.fromkeys(("upload", "push_to_hub"), "vlmrl push does it"),
    **dict.fromkeys(("export", "merge_lora", "lora_combiner"), "vlmrl merge does it"),
    **dict.fromkeys(("env", "check", "self-test", "selftest"), "vlmrl doctor does it"),
}
"""A name from elsewhere -> the verb to use here."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns the exit code: 0 success, 1 `doctor` found a problem, 2 an error in settings, data or the machine,
    130 interrupted, 143 ended by SIGTERM or SIGHUP. Without `argv` it is the program, which ends with that code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    verb = f"vlmrl {words[0]}" if words and words[0] in _VERBS else "vlmrl"
    code = exit_code(lambda: _run(words), verb)
    if argv is None:
        end_process(code)
    return code


def _run(words: list[str]) -> int:
    verb, *rest = words or ["--help"]
    if verb in ("--help", "-h", "help"):
        print(_HELP, flush=True)
        return 0
    if verb == "--version":
        print(__version__)
        return 0
    if verb in _ELSEWHERE:
        raise ConfigError(f"no verb is called {verb} here: {_ELSEWHERE[verb]}")
    if verb not in _VERBS:
        raise ConfigError(_unknown("verb", verb, _VERBS))
    return _VERBS[verb](rest)


def _run_of(config: str, function: str) -> Callable[[list[str]], int]:
    """A verb that makes a run: its settings, and the function of these that makes the run or, with `--dry-run`, checks
    it. Both are `module:name`, imported when the verb is called."""

    def run(words: list[str]) -> int:
        if (arguments := _parse(_imported(config), words, switches=("--dry-run", "--quiet"))) is not None:
            with _running(grace_s=arguments.config.train.stop_grace_s, dry_run=arguments.dry_run):
                _imported(function)(arguments.config, dry_run=arguments.dry_run, is_quiet=arguments.is_quiet)
        return 0

    return run


def _call_of(config: str, function: str) -> Callable[[list[str]], int]:
    """A verb that calls a function of its settings. Both are `module:name`, imported when the verb is called."""

    def call(words: list[str]) -> int:
        if (arguments := _parse(_imported(config), words)) is not None:
            _imported(function)(arguments.config)
        return 0

    return call


def _imported(spec: str) -> Any:
    module, _, name = spec.partition(":")
    return getattr(import_module(module), name)


@contextmanager
def _running(*, grace_s: float, dry_run: bool) -> Iterator[None]:
    """Around a run: signals, its folder of temporary files, and the fork server, whose imports take the longest."""
    with handle_signals(grace_s), scratch() as folder, nullcontext() if dry_run else fork_server(folder):
        yield


def _bench(words: list[str]) -> int:
    name, *rest = words or ["--help"]
    if name in ("--help", "-h"):
        print(f"usage: vlmrl bench {'|'.join(_BENCHMARKS)} [--config FILE.yaml ...] [--section.setting VALUE ...]")
        return 0
    if name not in _BENCHMARKS:
        raise ConfigError(_unknown("benchmark", name, _BENCHMARKS))
    return _BENCHMARKS[name](rest)


def _bench_sync(words: list[str]) -> int:
    from vlmrl.config.bench_verbs import SyncBench

    if (arguments := _parse(SyncBench, words)) is not None:
        from vlmrl.commands.bench.engines import sync

        with handle_signals(_GRACE_S):
            sync(arguments.config)
    return 0


def _bench_rollout(words: list[str]) -> int:
    from vlmrl.config.bench_verbs import RolloutBench

    if (arguments := _parse(RolloutBench, words)) is not None:
        from vlmrl.commands.bench.engines import rollout

        with handle_signals(arguments.config.train.stop_grace_s):
            rollout(arguments.config)
    return 0


def _bench_agents(words: list[str]) -> int:
    from vlmrl.config.bench_verbs import AgentsBench

    if (arguments := _parse(AgentsBench, words)) is not None:
        from vlmrl.commands.bench.engines import agents

        with handle_signals(arguments.config.train.stop_grace_s):
            agents(arguments.config)
    return 0


def _bench_async(words: list[str]) -> int:
    from vlmrl.config.bench_verbs import AsyncBench

    if (arguments := _parse(AsyncBench, words)) is not None:
        from vlmrl.commands.bench.asynchrony import asynchrony

        with handle_signals(arguments.config.train.stop_grace_s):
            asynchrony(arguments.config)
    return 0


def _push(words: list[str]) -> int:
    from vlmrl.config.push import PushConfig, full_names

    if (arguments := _parse(PushConfig, full_names(words), switches=("--dry-run",))) is not None:
        from vlmrl.commands.push import push

        push(arguments.config, dry_run=arguments.dry_run)
    return 0


def _plan(words: list[str]) -> int:
    from vlmrl.config.plan import PlanConfig, full_names

    if (arguments := _parse(PlanConfig, full_names(words))) is not None:
        from vlmrl.commands.plan import plan

        with scratch():
            plan(arguments.config)
    return 0


def _report(words: list[str]) -> int:
    from vlmrl.config.report import ReportConfig, with_runs

    if (arguments := _parse(ReportConfig, with_runs(words))) is not None:
        from vlmrl.commands.report import report

        report(arguments.config)
    return 0


def _serve_rm(words: list[str]) -> int:
    from vlmrl.config.serving import ServeConfig

    if (arguments := _parse(ServeConfig, words)) is not None:
        from vlmrl.commands.serve_reward import serve_rm

        with scratch():
            serve_rm(arguments.config)
    return 0


def _serve(words: list[str]) -> int:
    from vlmrl.config.serving import PolicyServeConfig

    if (arguments := _parse(PolicyServeConfig, words)) is not None:
        from vlmrl.commands.serve import serve

        with scratch():
            serve(arguments.config)
    return 0


_DOCTOR_HELP = """\
usage: vlmrl doctor [--json]
       vlmrl doctor --self-test [--json]
       vlmrl doctor --config FILE.yaml ... [--section.setting VALUE ...] [--json]

Report what this machine has, what works on it, and how to fix what does not. `--self-test` checks it in about two
minutes with tiny models: collectives, attention, ZeRO, engines, weight sync, adapters, two steps of GRPO; exit code 1
when a check fails, with the settings that avoid it. With the settings of rl, sft or rm: estimate the memory of that
run's roles from the model's configuration; exit code 2 when this machine has less."""


def _doctor(words: list[str]) -> int:
    if words in (["--help"], ["-h"]):
        print(_DOCTOR_HELP)
        return 0
    as_json = "--json" in words
    words = [word for word in words if word != "--json"]
    if words == ["--self-test"]:
        from vlmrl.commands.self_test import report

        return report.main(as_json=as_json)
    if words and "--config" not in words:
        raise ConfigError(
            "takes --json, --self-test, and --config FILE.yaml with other settings of the run, not " + " ".join(words)
        )
    if words:
        return _memory_plan(words, as_json=as_json)
    startup.prepare()
    from vlmrl.commands import doctor

    return doctor.main(as_json=as_json)


def _memory_plan(words: list[str], *, as_json: bool) -> int:
    from vlmrl.config.flags_and_yaml import read
    from vlmrl.config.stages import DpoConfig, RmConfig, SftConfig
    from vlmrl.config.training import TrainingConfig
    from vlmrl.config.verbs import RlConfig

    kinds: tuple[type[TrainingConfig], ...] = (SftConfig, RlConfig, DpoConfig, RmConfig)
    known = {name: field for kind in kinds for name, field in kind.settings().items()}
    given = read(words, known, sorted({name for kind in kinds for name in kind.sections()})).given
    # The first verb that has most of the settings: one that has all, if there is one. Those of engines are settings of
    # supervised stages only where they sample responses.
    of_engines = () if "eval.generate_enable" in given else ("reward.", "rollout.", "vllm.", "train.colocate_all")
    read_by = {
        kind: {name for name in kind.settings() if kind is RlConfig or not name.startswith(of_engines)}
        for kind in kinds
    }
    kind = max(kinds, key=lambda kind: len(given.keys() & read_by[kind]))
    if (arguments := _parse(kind, words)) is not None:
        from vlmrl.commands.memory import show

        return show(arguments.config, as_json=as_json)
    return 0


_BENCHMARKS: dict[str, Callable[[list[str]], int]] = {
    "sync": _bench_sync,
    "rollout": _bench_rollout,
    "agents": _bench_agents,
    "async": _bench_async,
    "step": _call_of("vlmrl.config.bench_verbs:StepBench", "vlmrl.commands.bench.step:step"),
    "sft": _call_of("vlmrl.config.bench_verbs:SftBench", "vlmrl.commands.bench.supervised:supervised"),
    "dpo": _call_of("vlmrl.config.bench_verbs:DpoBench", "vlmrl.commands.bench.dpo:step"),
    "logprobs": _call_of("vlmrl.config.bench_verbs:LogprobsBench", "vlmrl.commands.bench.logprobs:logprobs"),
}
_VERBS: dict[str, Callable[[list[str]], int]] = {
    "rl": _run_of("vlmrl.config.verbs:RlConfig", "vlmrl.commands.rl:train_rl"),
    "sft": _run_of("vlmrl.config.stages:SftConfig", "vlmrl.commands.sft:train_sft"),
    "rm": _run_of("vlmrl.config.stages:RmConfig", "vlmrl.commands.rm:train_rm"),
    "dpo": _run_of("vlmrl.config.stages:DpoConfig", "vlmrl.commands.dpo:train_dpo"),
    "eval": _run_of("vlmrl.config.verbs:EvalConfig", "vlmrl.commands.evaluate:evaluate"),
    "generate": _run_of("vlmrl.config.verbs:GenerateConfig", "vlmrl.commands.generate:generate"),
    "bench": _bench,
    "report": _report,
    "serve": _serve,
    "serve-rm": _serve_rm,
    "merge": _call_of("vlmrl.config.verbs:MergeConfig", "vlmrl.commands.merge:merge"),
    "plan": _plan,
    "push": _push,
    "doctor": _doctor,
}


@dataclass(frozen=True, slots=True)
class _Arguments(Generic[Config]):
    """The parsed arguments of a verb."""

    config: Config
    dry_run: bool
    is_quiet: bool


def _parse(kind: type[Config], words: list[str], *, switches: Collection[str] = ()) -> _Arguments[Config] | None:
    """Load the settings and prepare this process for heavy imports; on `--help` print the help and return None."""
    if "--help" in words or "-h" in words:
        from vlmrl.config.help import help_text

        print(help_text(kind, switches=switches), flush=True)
        return None
    from vlmrl.config.load import load

    config = load(kind, [word for word in words if word not in switches])
    given = {word for word in words if word in switches}
    startup.prepare()
    return _Arguments(config, dry_run="--dry-run" in given, is_quiet="--quiet" in given)


def _unknown(kind: str, name: str, names: Iterable[str]) -> str:
    known = list(names)
    similar = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {similar[0]}?" if similar else f"there are {', '.join(known)}"
    return f"no such {kind}: {name}; {hint}"
