"""The rules of this repository that no linter has: what breaks them is found, and nothing here does."""

from __future__ import annotations

from pathlib import Path

from tools.house_rules import MAX_LINES, same_names, sources_of, too_long

ROOT = Path(__file__).parents[3]


def test_a_name_of_two_public_classes_is_told_with_both_places() -> None:
    found = list(
        same_names(
            {
                "router/queue.py": "class Order: ...\n",
                "kv_transfer/links.py": "import os\n\n\nclass Order: ...\nclass _Own: ...\n",
                "router/own.py": "class _Own: ...\n",
                "tests/unit/test_queue.py": "class Order: ...\n",
                "pdserve/only.py": "class Outer:\n    class Order: ...\n",
            }
        )
    )
    assert found == ["class Order stands more than once: router/queue.py:1, kv_transfer/links.py:4"]


def test_a_file_may_have_so_many_lines_and_no_more() -> None:
    full = "\n" * MAX_LINES
    assert list(too_long({"a.py": full})) == []
    [said] = too_long({"a.py": full, "tests/test_b.py": full + "\n"})
    assert said == f"tests/test_b.py has {MAX_LINES + 1} lines, more than {MAX_LINES}"


def test_this_repository_keeps_them() -> None:
    sources = sources_of(ROOT)
    assert "router/app.py" in sources and not any("_pb2" in path for path in sources)
    assert [*same_names(sources), *too_long(sources)] == []
