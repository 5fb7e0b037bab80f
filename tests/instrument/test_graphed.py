"""Captured stages train as others do, to the last bit: on CPUs by an imitation of CUDA graphs, with all of their dangers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call
from torch.profiler import ProfilerActivity, profile

from instrument.graphed import GraphedStage
from instrument.models.gpt import GptStage
from instrument.models.gpt_config import GptConfig
from instrument.optim.clipping import OptimizerSync
from instrument.optim.gradient_sync import Reduce
from instrument.optim.main_parameters import accumulate_in
from pptrace.errors import ScheduleError
from pptrace.schedule.actions import Kind
from pptrace.schedule.registry import SCHEDULES, build
from pptrace.sizes.memory import MemoryPrediction
from pptrace.sizes.step import StepVolume
from tests.instrument.cases.graphed import STEPS, train_twice
from tests.instrument.models.cases.mixes import Mix, facts_of
from tests.instrument.models.test_mixes import check as check_mixes
from tests.instrument.pipeline.cases.training import Case
from tests.instrument.pipeline.test_exact import check
from tests.support.graph_imitation import Graph, capturing_on
from tests.support.pool import Pool

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_GPU)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """CPUs, where graphs are an imitation, and a GPU where there is one."""
    return torch.device(request.param)


CPU = torch.device("cpu")
CASES = {
    "gpipe": Case("gpipe", 2, 5, layers=5, tied=True),
    "1f1b": Case("1f1b", 4, 6, layers=5, ahead=2),
    "1f1b, host-staged": Case("1f1b", 2, 4, backend="host-staged"),
    "eager-1f1b": Case("eager-1f1b", 4, 9),
    "interleaved-1f1b": Case("interleaved-1f1b", 2, 6, chunks=2, tied=True, ahead=2),
    "looped-bfs": Case("looped-bfs", 2, 4, chunks=2),
    "interleaved-afab": Case("interleaved-afab", 2, 2, chunks=2),
    "one stage": Case("1f1b", 1, 3, layers=2, tied=True),
    "stages on one rank": Case("interleaved-1f1b", 1, 4, chunks=3, tied=True),
    "two replicas": Case("1f1b", 2, 3, dp=2, layers=3),
    "the ends alone": Case("1f1b", 4, 5, layers=4, split=(0, 2, 2, 0), vocabulary=300),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_losses_gradients_and_parameters_are_those_without_graphs_to_the_last_bit(pool: Pool, case: Case) -> None:
    outcomes = pool.run(train_twice, [case], world=case.pp * case.dp)
    for (outcome,) in outcomes:
        assert outcome.different == ()
        assert outcome.num_compared > STEPS
    ops = [action for row in case.plan.ranks for action in row if action.kind in (Kind.F, Kind.B)]
    assert sum(outcome.num_replays for (outcome,) in outcomes) == case.dp * len(ops)


def test_every_schedule_of_whole_backwards_is_among_the_cases() -> None:
    plans = [build(name, 2, 4, schedule.default_chunks) for name, schedule in SCHEDULES.items()]
    kinds = {plan.name: {action.kind for row in plan.ranks for action in row} for plan in plans}
    assert {name for name in kinds if kinds[name] == {Kind.F, Kind.B}} == {case.schedule for case in CASES.values()}


MIXES = {
    "zero 1": Mix(pp=2, dp=2, zero=1, schedule="interleaved-1f1b", bucket_bytes=3000, ahead=2),
    "sums later": Mix(pp=2, dp=2, reduce=Reduce.ALIGNED, bucket_bytes=3000, clip=0.3),
    "steps taken back": Mix(pp=2, clip=0.3, sync=OptimizerSync.POST_VALIDATION, tied=False),
}


@pytest.mark.parametrize("backend", ["gloo", *(pytest.param(name, marks=ON_GPU) for name in ("host-staged", "nccl"))])
def test_captured_stages_train_as_one_process_does(pool: Pool, backend: str) -> None:
    """On CPUs what is not compared to the last bit above, and all on a GPU that ranks share; and every sum of gradients is in a
    mark, with the bytes that are predicted.
    """
    cases = [replace(case, graphs=True, backend=backend) for case in CASES.values() if case.pp > 1]
    for mesh in sorted({(case.pp, case.dp) for case in cases}) if backend != "gloo" else ():
        check(pool, [case for case in cases if (case.pp, case.dp) == mesh])
    for mix in MIXES.values():
        check_mixes(pool, [replace(mix, graphs=True, host_staged=backend == "host-staged", nccl=backend == "nccl")])


CONFIG = GptConfig(2, 16, 4, 16, tied=True, dtype=torch.float64)
PASSED = torch.Size((2, 16, 16))


def stage_of(device: torch.device = CPU, dtype: torch.dtype = torch.float64) -> GptStage:
    """A stage between others."""
    return GptStage(replace(CONFIG, dtype=dtype), range(2), ends=(False, False)).to(device)


def captured(stage: nn.Module, num_slots: int) -> GraphedStage:
    parameter = next(stage.parameters())
    with capturing_on(parameter.device):
        return GraphedStage(stage, parameter.new_zeros(PASSED).requires_grad_(), num_slots)


def drawn(seed: int, stage: nn.Module) -> Tensor:
    drawn = torch.randn(PASSED, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(next(stage.parameters()))


def agree(found: list[Tensor], expected: list[Tensor]) -> bool:
    """To the last bit, but on a GPU, where a product may be added up in another order."""
    tolerance = 1e-12 if expected[0].is_cuda else 0
    return all(
        torch.allclose(one, other, rtol=tolerance, atol=tolerance) for one, other in zip(found, expected, strict=True)
    )


def gradients(stage: nn.Module, run: nn.Module, order: str) -> list[Tensor]:
    """Run forwards and backwards (capital letters) of microbatches: the gradients of their inputs, then of the parameters."""
    stage.zero_grad()
    inputs = {name: drawn(ord(name), stage).requires_grad_() for name in order.lower()}
    outputs: dict[str, Tensor] = {}
    for name in order:
        if name.islower():
            outputs[name] = run(inputs[name])
        else:
            output = outputs.pop(name.lower())
            output.backward(output.detach() + 1)
    finished = [tensor for name, tensor in inputs.items() if name.upper() in order]
    return [tensor.grad for tensor in (*finished, *stage.parameters())]


ORDERS = ("aAbBcC", "abcABC", "abcCBA", "abAcBCdD", "abBcCA")


@pytest.mark.parametrize("order", ORDERS)
def test_slots_serve_any_order_of_backwards(order: str, device: torch.device) -> None:
    stage = stage_of(device)
    assert agree(gradients(stage, captured(stage, 3), order), gradients(stage, stage, order))


def test_forwards_and_backwards_are_one_replay_each(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = stage_of()
    graphed = captured(stage, 2)
    monkeypatch.setattr(Graph, "num_replays", 0)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, monkeypatch.context() as without:
        without.setattr(Graph, "replay", lambda _: None)
        gradients(stage, graphed, "abAB")
    assert "aten::mm" not in {event.name for event in profiler.events()}
    gradients(stage, graphed, "abABcC")
    assert Graph.num_replays == 6


def test_gradients_of_more_bits_than_parameters_are_added_up_in_these() -> None:
    stage = stage_of(dtype=torch.bfloat16)
    accumulate_in(stage.parameters(), torch.float32)
    found, expected = (gradients(stage, run, "abABcC") for run in (captured(stage, 2), stage))
    assert agree(found, expected)
    assert {gradient.dtype for gradient in found} == {torch.bfloat16, torch.float32}


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Graphs of a stage that is gone are in cycles: to collect them would end the capture of others."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
def test_the_imitation_has_the_dangers_of_graphs() -> None:
    """Results used as they are train wrongly: gradients that autograd took over, and two microbatches at once."""
    stage = stage_of()
    names, parameters = zip(*stage.named_parameters(), strict=True)

    class Uncopied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            static = tuple(tensor.detach().clone().requires_grad_() for tensor in (drawn(0, stage), *parameters))
            with capturing_on(CPU):
                self._replay = torch.cuda.make_graphed_callables(
                    lambda x, *values: functional_call(stage, dict(zip(names, values, strict=True)), (x,)), static
                )

        def forward(self, x: Tensor) -> Tensor:
            return self._replay(x, *parameters)

    def are_right(order: str) -> list[bool]:
        return list(map(torch.equal, gradients(stage, Uncopied(), order), gradients(stage, stage, order)))

    assert all(are_right("aA"))
    assert not any(are_right("aAb"))
    is_a, is_b, *of_parameters = are_right("aAbB")
    assert (is_a, is_b, any(of_parameters)) == (False, True, False)
    assert not any(are_right("abBA")[:1])


def test_a_forward_without_a_free_slot_is_refused() -> None:
    graphed = captured(stage_of(), 2)
    with pytest.raises(ScheduleError, match="a forward begins while 2 wait for their backward"):
        gradients(graphed, graphed, "abcABC")


def test_a_forward_whose_backward_never_comes_leaves_its_slot() -> None:
    graphed = captured(stage_of(), 1)
    for seed in range(3):
        edge = get_gradient_edge(graphed(drawn(seed, graphed)))
        with pytest.raises(ScheduleError):
            graphed(drawn(seed, graphed))
        del edge


def test_a_backward_frees_its_slot_though_somebody_keeps_the_graph() -> None:
    graphed = captured(stage_of(), 1)
    outputs = []
    for seed in range(2):
        outputs.append(graphed(drawn(seed, graphed)))
        torch.autograd.backward(outputs[-1], torch.ones_like(outputs[-1]))
    assert len({output.data_ptr() for output in outputs}) == 1


def test_parameters_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without copies, whatever changes their values; each replay has memory of its own for its input alone."""
    stage, given, capture = stage_of(), list[tuple[Tensor, ...]](), torch.cuda.make_graphed_callables

    def watch(function: Callable[..., object], static: tuple[Tensor, ...]) -> Callable[..., object]:
        given.append(static)
        return capture(function, static)

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", watch)
    captured(stage, 2)
    held = [parameter.data_ptr() for parameter in stage.parameters()]
    assert [[tensor.data_ptr() for tensor in static[1:]] for static in given] == [held, held]
    assert len({static[0].data_ptr() for static in given}) == 2
    assert all(tensor.requires_grad for static in given for tensor in static)


def test_capturing_changes_nothing_that_training_sees(device: torch.device) -> None:
    stage, seen = stage_of(device), list[Tensor]()
    for parameter in stage.parameters():
        parameter.register_post_accumulate_grad_hook(seen.append)
    before = [parameter.detach().clone() for parameter in stage.parameters()]
    states = torch.get_rng_state(), *torch.cuda.get_rng_state_all()
    graphed = captured(stage, 2)
    assert seen == []
    assert all(parameter.grad is None for parameter in stage.parameters())
    assert all(map(torch.equal, before, stage.parameters()))
    assert all(map(torch.equal, states, (torch.get_rng_state(), *torch.cuda.get_rng_state_all())))
    assert list(graphed.parameters()) == list(stage.parameters())


def test_no_graph_is_destroyed_while_another_is_captured() -> None:
    """That would end the capture: graphs of a stage that is gone stay until a collection, which may come at any time."""
    stage, gone = stage_of(), [list[object]([Graph()])]
    gone[0].append(gone[0])

    class Collected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stage = stage

        def forward(self, x: Tensor) -> Tensor:
            if Graph.captured is not None:
                gone.clear()
                if gc.isenabled():
                    gc.collect()
            return self.stage(x)

    captured(Collected(), 2)
    assert gone == []
    assert gc.isenabled()


def test_an_evaluation_computes_without_graphs() -> None:
    stage = stage_of()
    graphed = captured(stage, 1)
    with torch.no_grad():
        outputs = [graphed(drawn(seed, stage)) for seed in range(3)]
        assert all(torch.equal(output, stage(drawn(seed, stage))) for seed, output in enumerate(outputs))


def test_activations_that_graphs_hold_are_not_predicted() -> None:
    mix = Mix(pp=2)
    for graphs in (False, True):
        volume = StepVolume(replace(facts_of(mix, STEPS), graphs=graphs), mix.shape, mix.plan)
        memory = MemoryPrediction(volume, on_device=True)
        assert (memory.of_rank(0).activations is None) == graphs
        assert ("captured graphs" in (memory.reason or "")) == graphs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")
def test_a_gpu_runs_a_forward_and_a_backward_as_one_launch_each() -> None:
    stage = stage_of(torch.device("cuda"))
    graphed = captured(stage, 2)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        gradients(stage, graphed, "abAB")
    names = [event.name for event in profiler.events()]
    assert names.count("cudaGraphLaunch") == 4
    assert "aten::addmm" not in names
