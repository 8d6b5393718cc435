"""Questions that are answered with the help of Python, which runs in a sandbox.

    vlmrl rl --train.agent_func_path examples/agents/python_tool.py:make ...

The sandbox is a process of Linux namespaces: no network, no other processes in sight, a read-only file system with one
folder of 16 MiB in memory, and limits of time and of the memory of each process. It can read files of this machine, but
send them nowhere.
Where namespaces are not permitted, the environment refuses to start.

With a dataset, the question and the label are those of the row, and a row without a label is refused; with the dataset
`episodes`, the environment makes its own questions.
"""

import functools
import random
import re
import shutil
import subprocess
import sys
import tempfile

from vlmrl.agents import Reply, tool

TIME_LIMIT_S = 5
MEMORY_MIB = 512
MAX_OUTPUT_CHARS = 4000

NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--ipc", "--uts", "--mount", "--pid", "--kill-child"]
SANDBOX = f"""
import ctypes, os, resource, sys
libc = ctypes.CDLL(None, use_errno=True)
def check(result, step):
    if result != 0:
        sys.exit(f"no sandbox: {{step}}: {{os.strerror(ctypes.get_errno())}}")
# mount_setattr: all of / is read-only, without devices and programs of other users.
attributes = (ctypes.c_uint64 * 4)(1 | 2 | 4, 0, 0, 0)
check(libc.syscall(442, -100, b"/", 0x8000, attributes, 32), "read-only files")
for folder in (b"/proc", b"/sys", b"/dev", b"/run", b"/tmp"):
    size = b"size=16m,nr_inodes=1000" if folder == b"/tmp" else b"size=4k,nr_inodes=2"
    check(libc.mount(b"none", folder, b"tmpfs", 2 | 4, size), "a folder in memory")
# Give up the rights that the mounts needed.
check(libc.unshare(0x10000000), "a second user namespace")
check(libc.prctl(38, 1, 0, 0, 0), "no new privileges")
limits = dict(AS={MEMORY_MIB} << 20, CPU={TIME_LIMIT_S}, FSIZE=16 << 20, NOFILE=64, CORE=0)
for limit, value in limits.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (value, value))
os.chdir("/tmp")
code = sys.stdin.read()
exec(compile(code, "<code>", "exec"), {{"__name__": "__main__"}})
"""


class PythonTool:
    """One question. A response without a call of the tool is the result."""

    def reset(self, row, seed):
        if row is not None:
            self.label = row.get("label")
            if self.label is None:
                raise ValueError("the row has no label to compare results with: set data.label_key to its column")
            return None  # the row's own prompt
        numbers = random.Random(seed)
        bound, divisor = numbers.randint(100, 999), numbers.randint(3, 9)
        self.label = str(sum(n * n for n in range(1, bound + 1) if n % divisor == 0))
        return f"What is the sum of the squares of all multiples of {divisor} from 1 to {bound}? Use Python."

    def step(self, response):
        numbers = re.findall(r"-?\d+(?:\.\d+)?", response)
        return Reply(reward=float(bool(numbers) and numbers[-1] == str(self.label)), done=True)

    @tool
    def python(self, code: str) -> str:
        """Run Python code, and return what it prints. Each call starts anew."""
        return run(code)


def run(code):
    """Run code in a sandbox, and return its output."""
    with tempfile.TemporaryFile() as output:
        try:
            # A file, and not a pipe: FSIZE limits it.
            subprocess.run(
                [*NAMESPACES, sys.executable, "-I", "-c", SANDBOX],
                input=code.encode(),
                stdout=output,
                stderr=subprocess.STDOUT,
                env={},
                timeout=TIME_LIMIT_S + 1,
                check=False,
            )
            end = ""
        except subprocess.TimeoutExpired:
            end = f"\n[ended after {TIME_LIMIT_S} s]"
        output.seek(0)
        text = output.read(4 * MAX_OUTPUT_CHARS).decode(errors="replace")
    return (text if len(text) <= MAX_OUTPUT_CHARS else f"{text[:MAX_OUTPUT_CHARS]}\n[cut]") + end


@functools.cache
def check():
    """Refuse to run code without a sandbox."""
    if not shutil.which("unshare"):
        raise RuntimeError("there is no sandbox for Python here: it needs Linux, and unshare of util-linux")
    output = run("print(6 * 7)")
    if output != "42\n":
        raise RuntimeError(f"this machine permits no sandbox for Python (as many containers do): {output.strip()}")


def make():
    check()
    return PythonTool()
