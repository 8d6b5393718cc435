"""Between processes, errors keep their type, images are passed as handles, and every wait has a limit."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from processes import command, command_line
from ray._private.utils import get_dashboard_dependency_error

from vlmrl.cluster.data import SourceSettings, created_bytes, put
from vlmrl.cluster.placement import Place
from vlmrl.cluster.prompts import RemotePrompts
from vlmrl.cluster.session import session
from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.config.data import Data
from vlmrl.data.media import InlineMedia
from vlmrl.errors import ClusterError, ConfigError
from vlmrl.observe.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("ray_session")


def start(build: Callable[[], Any], *, timeout_s: float = 60.0, workers: int = 1) -> WorkerGroup[Any]:
    with session() as machines:
        places = [Place(0, (worker,)) for worker in range(workers)]
        return WorkerGroup("helper", build, session=machines, places=places, timeout_s=timeout_s)


def test_a_mistake_found_in_an_actor_arrives_as_itself(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    group = start(partial(RunFolder, tmp_path))
    with pytest.raises(ConfigError, match="holds another run") as caught:
        group.call(lambda folder: folder.check(resume=False, has_checkpoint=False))
    assert "Traceback" not in str(caught.value)
    group.shutdown()


def test_a_bug_in_an_actor_keeps_its_traceback() -> None:
    group = start(PurePath)
    with pytest.raises(ray.exceptions.RayTaskError, match="AttributeError"):
        group.call(lambda path: path.no_such_method())
    group.shutdown()


def test_a_runs_own_ray_has_no_dashboard_whose_agent_would_serve_ports() -> None:
    processes = psutil.Process().children(recursive=True)
    (raylet,) = [words for process in processes if (words := command(process)) and words[0].endswith("/raylet")]
    (agent,) = [word for word in raylet if word.startswith("--dashboard_agent_command=")]
    assert "--minimal" in agent.split()
    agents = [process for process in processes if "DashboardAgent" in command_line(process)]
    open_ports = [port for process in agents for port in process.net_connections() if port.status == "LISTEN"]
    assert not open_ports
    assert get_dashboard_dependency_error is ray._private.utils.get_dashboard_dependency_error, "as it was"


def test_workers_run_at_the_priority_of_the_run() -> None:
    group = start(partial(importlib.import_module, "os"))
    assert group.call(lambda os: os.nice(0)) == [os.nice(0)]
    group.shutdown()


def test_an_actor_that_hangs_is_an_error_that_names_it() -> None:
    group = start(threading.Event)
    with pytest.raises(ClusterError, match=r"helper did not respond within 1 s.*--train.timeout_s"):
        group.wait(group.submit(lambda event: event.wait()), timeout_s=1.0)
    with pytest.raises(ClusterError, match=r"helper did not respond within 1 s: raise --other.limit"):
        group.wait(group.submit(lambda event: event.wait()), timeout_s=1.0, flag="--other.limit")
    group.shutdown()


def test_an_actor_that_dies_is_an_error_that_names_it() -> None:
    group = start(partial(importlib.import_module, "os"))
    with pytest.raises(ClusterError, match=r"^helper on \S+ ended (with exit code 3|without a message)") as caught:
        group.call(lambda os: os._exit(3))
    assert "\n" not in str(caught.value)
    group.shutdown()


def test_what_an_actor_held_in_shared_memory_is_gone_with_it() -> None:
    name = f"vlmrl-test-{os.getpid()}"
    group = start(partial(SharedMemory, name=name, create=True, size=16))
    file = Path("/dev/shm", name)
    assert file.exists()
    group.shutdown()
    deadline = time.monotonic() + 20
    while file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not file.exists(), "Ray has killed Python's resource tracker"


def test_arguments_meet_their_workers_and_answers_keep_their_order() -> None:
    group = start(partial(importlib.import_module, "math"), workers=2)
    assert group.each(lambda math, number: math.sqrt(number), [4.0, 9.0]) == [2.0, 3.0]
    assert group.call(lambda math: math.floor(2.5)) == [2, 2]
    with pytest.raises(ValueError, match="3 items for 2 workers of helper"):
        group.each(lambda math, number: math.sqrt(number), [1.0, 2.0, 3.0])
    group.shutdown()


def test_an_image_is_stored_once_however_often_its_handle_travels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    before = created_bytes()
    handle = put(InlineMedia(hash="image", size=(256, 256), pixels=pixels))
    group = start(partial(importlib.import_module, "operator"))
    for _ in range(20):
        assert group.call(lambda operator: operator.length_hint([handle] * 16)) == [16]
    assert pixels.nbytes <= created_bytes() - before < 1.2 * pixels.nbytes
    assert np.array_equal(handle.fetch(), pixels)
    group.shutdown()


def test_the_bytes_of_a_draw_are_those_of_its_images(tiny_model: Callable[..., str]) -> None:
    settings = SourceSettings(
        model=tiny_model("qwen2_5_vl", size="micro"),
        trust_remote_code=False,
        data=Data(prompt_dataset="visual_math?families=count&pixels=224&size=16", max_len=256),
        evaluation=None,
        seed=1,
    )
    group = start(settings.build)
    before = created_bytes()
    prompts, metrics = group.call(lambda source: source.draw(8))[0]
    moved = created_bytes() - before
    assert metrics["media/bytes_moved"] == 8 * 224 * 224 * 3
    assert metrics["media/bytes_moved"] <= moved < 1.1 * metrics["media/bytes_moved"]
    assert prompts[0].media[0].fetch().shape == (224, 224, 3)
    group.shutdown()


_SHARED_MACHINE = """
import os
from vlmrl import startup
startup.prepare()
os.environ["CUDA_VISIBLE_DEVICES"] = "GPU-8932f937,5,MIG-4d2a"
import vlmrl.cluster, ray
ray.init(num_cpus=2, num_gpus=3, include_dashboard=False, log_to_driver=False)
os.environ["CUDA_VISIBLE_DEVICES"] = "0,1,2"  # of the driver, which may be on another machine
from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.cluster.placement import Place
from vlmrl.cluster.session import session
with session() as machines:
    places = [Place(0, (1,)), Place(0, (0, 2))]
    group = WorkerGroup("helper", dict, session=machines, places=places, timeout_s=60)
    seen = [ray.get(w.__ray_call__.remote(lambda _: os.environ["CUDA_VISIBLE_DEVICES"])) for w in group._workers]
    print("seen", machines.nodes[0].gpus, seen)
ray.shutdown()
"""


def test_workers_get_the_gpus_that_their_node_was_given_and_no_others() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SHARED_MACHINE],
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "seen ('GPU-8932f937', '5', 'MIG-4d2a') ['5', 'GPU-8932f937,MIG-4d2a']" in done.stdout, done.stderr


_PRIVATE = """
import gc, os, stat, tempfile, threading, time
from pathlib import Path
from vlmrl import startup
startup.prepare()
from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.cluster.placement import Place
from vlmrl.cluster.session import session
import ray
with session(num_cpus=2) as machines:
    places = [Place(0, (rank,)) for rank in range(2)]
    how = {"session": machines, "places": places, "timeout_s": 60, "distributed": True}
    def join():
        from vlmrl.learning.deepspeed_engine import init_distributed
        init_distributed(30)
    group = WorkerGroup("ranks", join, **how)
    def look(_):
        import torch.distributed
        tempfile.mkdtemp()
        return [tempfile.gettempdir(), torch.distributed.get_world_size(), os.environ.get("MASTER_PORT")]
    seen = [ray.get(worker.__ray_call__.remote(look)) for worker in group._workers]
    folder = Path(tempfile.gettempdir())
    of_ray = Path(ray._private.worker._global_node.get_session_dir_path())
    print("seen", oct(stat.S_IMODE(folder.stat().st_mode)), folder in of_ray.parents, (of_ray / "sockets").exists())
    print("ranks", [(own == str(folder), size, port) for own, size, port in seen])
    gc.disable()
    for _ in range(10_000):
        cell = [ray.put(0)]
        cell.append(cell)
    def collect_while_ray_ends():
        while ray._private.worker.global_worker.connected:
            time.sleep(0.001)
        gc.collect()
    threading.Thread(target=collect_while_ray_ends, daemon=True).start()
print("ended")
"""


def test_ray_and_ranks_keep_to_a_folder_of_this_user_alone_which_is_gone_at_the_end() -> None:
    with tempfile.TemporaryDirectory(prefix="v", dir="/tmp") as parent:
        done = subprocess.run(
            [sys.executable, "-c", _PRIVATE],
            env={n: v for n, v in os.environ.items() if n not in ("RAY_ADDRESS", "RAY_TMPDIR")} | {"TMPDIR": parent},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert "seen 0o700 True True" in done.stdout, done.stderr
        assert "ranks [(True, 2, None), (True, 2, None)]" in done.stdout
        assert "ended" in done.stdout, "a collection in another thread met a Ray that was gone, which ends the process"
        assert list(Path(parent).iterdir()) == []


def test_labels_are_parsed_below_the_data_process(tmp_path: Path, tiny_model: Callable[..., str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"input": "a", "label": "\\\\frac{1}{2}"}\n{"input": "b", "label": "\\\\frac{1}{"}\n')
    settings = SourceSettings(
        model=tiny_model("qwen3", size="micro"),
        trust_remote_code=False,
        data=Data(prompt_dataset=str(file), max_dropped_fraction=0.5),
        evaluation=None,
        seed=1,
        functions=("math",),
    )
    group = start(settings.build)
    messages: list[str] = []
    prompts = RemotePrompts(group, say=messages.append)
    prompts.check_labels()
    drawn, metrics = prompts.draw(2)
    group.shutdown()
    assert [prompt.source for prompt in drawn] == ["rows:0", "rows:0"]
    assert metrics["data/rows_dropped"] == 1
    assert messages[0].startswith("labels: 1 of the first 2 rows cannot be used by reward.functions")
    assert "row rows:1 dropped, label unusable" in messages[1]
