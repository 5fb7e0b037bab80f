"""Steps of a script that captures them into CUDA graphs, with a class of graphs that remembers calls in place of torch's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from instrument.launch.recording.optimizer_steps import OptimizerSteps
from instrument.launch.recording.shortfall import describe_activity
from tests.instrument.launch.test_launch_steps import Ledger, make_optimizer, watching


class Graph:
    """A graph without a device."""

    def capture_begin(self) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> str:
        return "replayed"


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    with watching(Ledger()) as steps:
        yield steps


def capture(optimizer: torch.optim.Optimizer | None = None) -> Graph:
    """Capture a forward, a backward and the step of an optimizer, if there is one."""
    graph, weight = Graph(), torch.ones(2, requires_grad=True)
    graph.capture_begin()
    torch.nn.Identity()(weight).sum().backward()
    if optimizer is not None:
        optimizer.step()
    graph.capture_end()
    return graph


def test_every_replay_of_a_captured_step_is_one(ledger: Ledger) -> None:
    optimizer = make_optimizer(ledger)
    for _ in range(2):
        optimizer.step()
    graph = capture(optimizer)
    assert ledger.num_steps == 2  # those of the warm-up: a capture is none
    ledger.events.clear()
    assert [graph.replay() for _ in range(2)] == ["replayed"] * 2
    assert ledger.events == ["begin 2", "end 2", "begin 3", "end 3", "begin 4"]  # step 2 anew, without the capture


def test_nothing_of_a_script_begins_in_a_capture(ledger: Ledger) -> None:
    graph = capture(make_optimizer(ledger))
    assert ledger.events == ["step"]
    graph.replay()
    assert ledger.events == ["step", "begin 0", "end 0", "begin 1"]


def test_graphs_of_layers_leave_the_steps_to_the_optimizer(ledger: Ledger) -> None:
    optimizer, graphs = make_optimizer(ledger), [capture() for _ in range(4)]
    for _ in range(3):
        for graph in graphs:
            graph.replay()
        optimizer.step()
    assert ledger.num_steps == 3


def test_several_graphs_with_a_step_each_make_one_iteration(ledger: Ledger) -> None:
    first, second = (capture(make_optimizer(ledger)) for _ in range(2))
    for _ in range(4):
        first.replay()
        second.replay()
    assert ledger.num_steps == 1 + 3  # the first iteration cannot know of the second graph


def test_a_graph_is_captured_again_without_its_step(ledger: Ledger) -> None:
    graph = capture(make_optimizer(ledger))
    graph.capture_begin()
    graph.capture_end()
    graph.replay()
    assert ledger.num_steps == 0


def test_replays_without_an_optimizer_are_named_where_there_is_no_step(ledger: Ledger) -> None:
    graph = capture()
    graph.replay()
    graph.replay()
    assert describe_activity(ledger.observer) == (
        "CUDA graphs were replayed 2 times, in which no torch optimizer had stepped when they were captured"
    )


def test_graphs_are_as_they_were_once_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    before = Graph.replay, Graph.capture_begin, Graph.capture_end
    observer = OptimizerSteps(Ledger())
    assert Graph.replay is not before[0]
    observer.detach()
    assert (Graph.replay, Graph.capture_begin, Graph.capture_end) == before
