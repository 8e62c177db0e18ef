"""The rules of the house: imports run down, small rooms, no torch in the pytest process, a complete README."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from perf.measure.connection import ROOT

FLOORS = ("strategies", "perf/facts", "perf/judge", "perf/measure", "perf/tell", "perf", "tools")
"""From below: a room imports from its own floor and from those under it."""
SOURCES = sorted(path for house in ("strategies", "perf", "tools") for path in (ROOT / house).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
TORCH_ROOMS = {f"perf.measure.{room}" for room in ("worker", "comms", "probes", "tracing", "ceilings")}
"""Modules of perf that run in the ranks."""
MAX_MODULE_LINES, MAX_FUNCTION_LINES = 300, 60
BANNED_NAMES = {"utils", "common", "helpers", "misc"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in SOURCES}


def imports_of(path: Path) -> set[str]:
    """Our own modules that a file imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: a relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name in MODULES}


def floor_of(path: Path) -> int:
    return FLOORS.index(str(path.relative_to(ROOT).parent))


def upward_imports(path: Path) -> list[str]:
    return [name for name in imports_of(path) if floor_of(MODULES[name]) > floor_of(path)]


def find_circle(edges: dict[str, set[str]]) -> list[str] | None:
    """A path of imports that comes back to where it began."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str] | None:
        if name in trail:
            return trail[trail.index(name) :]
        if name in done:
            return None
        for other in sorted(edges.get(name, ())):
            if circle := visit(other, [*trail, name]):
                return circle
        done.add(name)
        return None

    return next((circle for name in sorted(edges) if (circle := visit(name, []))), None)


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_run_down(path):
    assert not upward_imports(path)


def test_nobody_imports_a_tool():
    assert not [path for path in SOURCES if any(name.startswith("tools.") for name in imports_of(path))]


def test_no_import_circle():
    assert find_circle({name: imports_of(path) - {name} for name, path in MODULES.items()}) is None


def test_circle_finder_finds_one():
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


@pytest.mark.parametrize("path", [*SOURCES, *TESTS], ids=module_name)
def test_rooms_are_small_and_well_named(path):
    text = path.read_text()
    assert text.count("\n") <= MAX_MODULE_LINES
    assert path.stem not in BANNED_NAMES
    assert text.isascii()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "the first line says which room this is"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno + 1 <= MAX_FUNCTION_LINES, node.name


def test_pytest_side_imports_without_torch():
    """Every module but the ranks' own, in an interpreter where importing torch fails."""
    names = sorted(
        name
        for name in MODULES
        if name.startswith(("perf", "tools", "strategies.spec")) and name not in TORCH_ROOMS | {"perf.test_cells"}
    )
    known = {"perf.plugin", "perf.suite", "perf.tell.report", "tools.approve", "tools.history", "tools.report"}
    assert known <= set(names)
    code = "import sys; sys.modules['torch'] = None; import importlib\n" + "\n".join(
        f"importlib.import_module({name!r})" for name in names
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def tracked_files() -> list[str]:
    result = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip("not a git checkout")
    return [name for name in result.stdout.splitlines() if (ROOT / name).exists()]


def readme_tree() -> set[str]:
    """Paths in the README's tree: a line is an indented name and what it is; folders end with a slash."""
    text = (ROOT / "README.md").read_text()
    block = text.split("```tree\n", 1)[1].split("```", 1)[0]
    paths, folders = set(), []
    for line in block.splitlines():
        name = line.split()[0] if line.split() else ""
        if not name or not line.strip():
            continue
        depth = (len(line) - len(line.lstrip())) // 2
        folders = folders[:depth]
        if name.endswith("/"):
            folders.append(name)
        else:
            paths.add("".join(folders) + name)
        assert len(line.split()) > 1, f"README: {name} has no words"
    return paths


def test_readme_tree_has_every_source_and_nothing_else():
    tree = readme_tree()
    assert {path for path in tree if not (ROOT / path).exists()} == set()
    roomy = ("strategies/", "perf/", "tools/")
    files = {name for name in tracked_files() if name.startswith(roomy) and not name.endswith("__init__.py")}
    top = {name for name in tracked_files() if "/" not in name and not name.startswith(".")}
    assert (files | top) - tree == set()


TESTED_WITH = {
    "arm": "trials",
    "gate": "selftest",
    "selftest_summary": "selftest",
    "value": "spec",
    "attention": "model",
    "captured": "gpu_training",
    "data_parallel": "equivalence",
    "fully_sharded": "equivalence",
    "sharded": "equivalence",
    "stage": "pipeline_parallel",
    "loss": "equivalence",
    "context_index": "context_attention",
    "block_attention": "context_attention",
    "ring_attention": "context_attention",
    "ulysses": "context_attention",
    "vocabulary_parallel": "tensor_parallel",
    "norm": "tensor_parallel",
    "partial_gradients": "tensor_parallel",
    "layout": "spec",
    "record": "measurement",
    "job": "launch",
    "connection": "launch",
    "server": "launch",
    "process_tree": "session",
    "bars": "charts",
    "plot": "charts",
    "axes_chart": "axes",
    "lettering": "charts",
    "history_pages": "history_charts",
    "tables": "report",
    "sections": "doctor",
    "intervals": "timeline",
    "trace_events": "timeline",
    "kernel_names": "evidence",
    "explanation": "evidence",
    "examination": "preflight",
    "bisection": "bisect",
    "arms": "trials",
    "bench": "plugin",
    "options": "plugin",
    "settings": "plugin",
    "summary": "plugin",
    "declarations": "plugin",
}
"""Rooms that have no test file of their own, and whose test covers them."""


def test_every_room_of_perf_and_strategies_has_its_test():
    tested = {path.stem.removeprefix("test_") for path in TESTS}
    rooms = {path.stem for path in SOURCES if path.stem not in {"__init__", "test_cells", "test_selftest"}}
    assert {room for room in rooms if TESTED_WITH.get(room, room) not in tested} == set()
    assert set(TESTED_WITH) <= rooms


def test_installs_no_module_and_pins_every_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["packages"] == []
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    wanted = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["dev"]
    names = {"".join(c if c.isalnum() or c == "-" else " " for c in text).split()[0].lower() for text in wanted}
    assert names <= pinned
