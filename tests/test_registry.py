"""Room strategies/registry.py: the only list of strategies is complete, tested, and explained."""

import ast
import inspect
import itertools
from pathlib import Path

import pytest

from strategies import spec
from strategies.registry import BUILDERS, device_of
from strategies.sharded import Builder
from strategies.spec import StrategyName
from tests.test_equivalence import NUM_RANKS


def doc_lines(class_name):
    """First line of the text under each member of a class in spec.py."""
    tree = ast.parse(Path(spec.__file__).read_text())
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name).body
    found = {}
    for node, following in itertools.pairwise(body):
        if isinstance(node, ast.Assign) and isinstance(following, ast.Expr):
            found[node.value.value] = ast.literal_eval(following.value).splitlines()[0]
    return found


def test_builders_are_exactly_the_strategies():
    assert list(BUILDERS) == list(StrategyName)


@pytest.mark.parametrize("strategy", StrategyName)
def test_builder_has_the_one_signature(strategy):
    wanted = list(inspect.signature(Builder.__call__).parameters)[1:]
    assert list(inspect.signature(BUILDERS[strategy]).parameters) == wanted
    assert BUILDERS[strategy].__name__.startswith("build_")
    assert BUILDERS[strategy].__doc__


@pytest.mark.parametrize("strategy", StrategyName)
def test_strategy_has_an_equivalence_test_over_more_than_one_rank(strategy):
    assert NUM_RANKS[strategy] == 1 if strategy is StrategyName.SINGLE else NUM_RANKS[strategy] >= 2


@pytest.mark.parametrize("strategy", StrategyName)
def test_strategy_has_a_doc_line(strategy):
    assert len(doc_lines("StrategyName").get(strategy.value, "").split()) >= 5


@pytest.mark.parametrize(
    ("kind", "local_rank", "device"), [("cpu", 3, "cpu"), ("cuda", 3, "cuda:3"), ("cuda", 0, "cuda:0")]
)
def test_rank_gets_its_own_gpu_or_the_cpu(kind, local_rank, device):
    assert str(device_of(kind, local_rank)) == device
