"""`make metrics`: write the tables of vlmrl/observe/README.md from the registry of metrics.

python assets/metrics_guide.py
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vlmrl.observe.registry import group_titles, guide_table

GUIDE = Path(__file__).resolve().parents[1] / "vlmrl/observe/README.md"
_TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def with_tables(guide: str) -> str:
    """Return the guide with the first table below each group's heading replaced.

    Raises:
        ValueError: a group has no heading or no table there.
    """
    for title in group_titles():
        before, heading, after = guide.partition(f"### {title}\n")
        table = _TABLE.search(after.partition("\n#")[0])
        if not heading or table is None:
            raise ValueError(f"{GUIDE}: the group {title!r} needs a heading of level 3 and a table below it")
        guide = before + heading + after[: table.start()] + guide_table(title) + "\n" + after[table.end() :]
    return guide


if __name__ == "__main__":
    GUIDE.write_text(with_tables(GUIDE.read_text()))
