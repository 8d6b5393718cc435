"""`python -m vlmrl.report PARENT FOLDER MAX_MIB`: write a run's report.html, at the lowest priority.

For the run itself, whose process is PARENT. An error is one line on stderr, with exit code 1.
"""

import os
import sys
from pathlib import Path

from vlmrl.system.lifeline import die_with


def main(parent: str, folder: str, max_mib: str) -> int:
    """Write the report of the run that this process belongs to; return the exit code."""
    die_with(int(parent))
    os.nice(19)
    from vlmrl.observe.run_folder import RunFolder
    from vlmrl.report.page import write_report

    out = RunFolder(Path(folder)).report
    try:
        write_report([out.parent], out, max_mib=float(max_mib))
    except Exception as error:  # whatever it is, the run goes on and names it once
        sys.stderr.write(" ".join(f"{type(error).__name__}: {error}".split()) + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
