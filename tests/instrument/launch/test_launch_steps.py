"""Steps that are profiled, and the boundaries of steps of a script that does not know pptrace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instrument import session
from instrument.launch.record import MadeOptimizers
from instrument.launch.recording.optimizer_steps import IterationRule, OptimizerSteps
from instrument.launch.recording.shortfall import ended_early
from instrument.launch.window import StepWindow, parse_steps
from instrument.recorder import Range, Recorder
from instrument.session import Session
from pptrace.errors import UsageError
from pptrace.marks import SpanKind


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_a_window_reads_back_as_it_was_written(first: int, length: int) -> None:
    window = StepWindow(first, first + length)
    assert parse_steps(str(window)) == window
    assert first in window
    assert first + length not in window
    assert first - 1 not in window


def test_all_is_the_window_of_every_step() -> None:
    window = parse_steps("all")
    assert 0 in window
    assert 10**9 in window
    assert window.whole_run
    assert str(window) == "all"


@pytest.mark.parametrize("text", ["", "5", "a:b", "1:", ":3", "-1:3", "1:3x", "1:3:5", "١:٣", "ALL"])
def test_a_text_that_is_no_window_is_quoted_with_what_was_expected(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_steps(text)
    assert str(caught.value) == f"--steps {text!r}: expected FIRST:STOP, such as '2:5', or 'all'"


@pytest.mark.parametrize("text", ["5:2", "3:3"])
def test_an_empty_window_is_refused_with_a_window_that_is_not(text: str) -> None:
    with pytest.raises(UsageError, match=rf"'{text}' holds no step: .*did you mean '{text[0]}:{int(text[0]) + 1}'\?"):
        parse_steps(text)


def test_why_a_trace_is_short_names_the_profiler_that_ran_before() -> None:
    assert ended_early("2:4", "2:5", 4, later=False) == (
        "recorded steps 2:4 of --steps 2:5: the script ended after 4 steps"
    )
    assert ended_early("7:8", "2:5", 8, later=True) == (
        "recorded steps 7:8 instead of --steps 2:5: the script's own torch.profiler ran before, "
        "and the script ended after 8 steps"
    )


def ends(order: str) -> str:
    """The order of optimizer steps with a bar where an iteration ends."""
    rule, text = IterationRule(), ""
    for name in order:
        text += "|" if rule.before(ord(name)) else ""
        text += name
        text += "|" if rule.after(ord(name)) else ""
    return text


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("aaa", "a|a|a|"),
        ("ababab", "a|bab|ab|"),  # the first iteration cannot know of b yet
        ("abcabc", "a|bcabc|"),
        ("aabababab", "a|a|ba|bab|ab|"),  # b comes later
        ("aaaabaaaabaa", "a|a|a|a|ba|a|a|a|ba|a|"),  # an outer optimizer, which steps now and then
        ("aabaabaab", "a|a|ba|a|ba|a|b"),
        ("ababaaa", "a|bab|a|a|a|"),  # b goes away: one end is late
    ],
)
def test_an_iteration_ends_with_the_optimizer_that_was_last_before_the_first_came_again(
    order: str, expected: str
) -> None:
    assert ends(order) == expected


class Ledger(Session):
    """Writes down the boundaries of steps."""

    observer: OptimizerSteps

    def __init__(self) -> None:
        super().__init__(Recorder())
        self.events: list[str] = []

    def begin_step(self) -> None:
        self.events.append(f"begin {self.num_steps}")

    def end_step(self) -> None:
        self.events.append(f"end {self.num_steps}")
        super().end_step()


def make_optimizer(ledger: Ledger, inner: torch.optim.Optimizer | None = None) -> torch.optim.Optimizer:
    """An optimizer of a class of its own: torch hooks each class once, for good."""

    class Noting(torch.optim.Optimizer):
        def step(self, closure: object = None) -> None:
            if closure is not None:
                raise ValueError("no closure here")
            ledger.events.append("step")
            if inner is not None:
                inner.step()

    return Noting([torch.zeros(1, requires_grad=True)], {})


@contextmanager
def watching(ledger: Ledger) -> Iterator[Ledger]:
    """Enter the steps of what runs in a ledger."""
    ledger.observer = OptimizerSteps(ledger)
    try:
        yield ledger
    finally:
        ledger.observer.detach()


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with watching(Ledger()) as steps:
        yield steps


def test_step_0_begins_with_the_first_forward_and_every_optimizer_step_ends_one(ledger: Ledger) -> None:
    optimizer = make_optimizer(ledger)
    assert ledger.events == []
    torch.nn.Identity()(torch.zeros(1))
    assert ledger.events == ["begin 0"]
    optimizer.step()
    torch.nn.Identity()(torch.zeros(1))
    assert ledger.events == ["begin 0", "step", "end 0", "begin 1"]


def test_without_modules_step_0_begins_with_the_first_backward_though_there_is_an_optimizer(ledger: Ledger) -> None:
    optimizer, weight = make_optimizer(ledger), torch.ones(1, requires_grad=True)
    for _ in range(2):
        for _ in range(2):
            ledger.events.append("backward")
            weight.sum().backward()
        optimizer.step()
    backwards = ["backward", "backward", "step"]
    assert ledger.events == ["backward", "begin 0", *backwards[1:], "end 0", "begin 1", *backwards, "end 1", "begin 2"]


def test_a_step_is_open_while_the_optimizer_that_ends_iterations_has_not_stepped(ledger: Ledger) -> None:
    first, second = make_optimizer(ledger), make_optimizer(ledger)
    seen = [ledger.observer.is_step_open]
    for optimizer in (first, second, first, second):
        optimizer.step()
        seen.append(ledger.observer.is_step_open)
    assert seen == [False, False, False, True, False]


def test_an_optimizer_inside_another_ends_no_step_of_its_own(ledger: Ledger) -> None:
    outer = make_optimizer(ledger, inner=make_optimizer(ledger))
    outer.step()
    outer.step()
    assert ledger.events == ["begin 0", "step", "step", "end 0", "begin 1", "step", "step", "end 1", "begin 2"]


def test_an_optimizer_step_that_raises_ends_no_step(ledger: Ledger) -> None:
    optimizer = make_optimizer(ledger)
    with pytest.raises(ValueError, match="no closure here"):
        optimizer.step(closure=1)
    optimizer.step()
    assert ledger.events == ["begin 0", "step", "end 0", "begin 1"]


def test_a_script_that_marks_its_own_steps_is_left_alone_from_then_on(ledger: Ledger) -> None:
    optimizer = make_optimizer(ledger)
    ledger.observer.detach()
    optimizer.step()
    torch.nn.Identity()(torch.zeros(1))
    assert ledger.events == ["step"]


def test_a_script_without_a_launcher_gets_its_steps_and_nothing_else() -> None:
    run = session.current()
    assert run is session.current()
    before = run.num_steps
    assert list(run.steps(3)) == [0, 1, 2]
    for step in run.steps(5):
        if step == 1:
            break
    assert run.num_steps == before + 5
    assert not run.recorder.listening


def test_passes_of_a_pipeline_are_steps_where_not_all_of_its_ranks_have_an_optimizer(ledger: Ledger) -> None:
    ends = partial(ledger.observer.ends_before_pass, have_optimizers=False)
    assert [ends(number) for number in (0, 1, 2)] == [False, True, True]
    make_optimizer(ledger).step()
    assert ends(1)


def test_passes_before_one_update_are_one_step_until_too_many_have_none(ledger: Ledger) -> None:
    ends = partial(ledger.observer.ends_before_pass, have_optimizers=True)
    assert not ledger.observer.has_optimizers
    optimizer = make_optimizer(ledger)
    assert ledger.observer.has_optimizers
    assert [ends(number) for number in (1, 15, 16, 1)] == [False, False, True, True]
    optimizer.step()
    assert [ends(number) for number in (1, 255, 256, 1)] == [False, False, True, True]
    optimizer.step()
    assert not ends(1)


def test_passes_in_the_step_of_an_optimizer_are_part_of_it(ledger: Ledger) -> None:
    """A closure runs the pipeline, as often as LBFGS asks for."""
    ended: list[bool] = []
    optimizer = torch.optim.LBFGS([torch.ones(1, requires_grad=True)], max_iter=3)

    def closure() -> float:
        ended.append(ledger.observer.ends_before_pass(1, have_optimizers=False))
        return 1.0

    optimizer.step(closure)
    assert not any(ended)
    assert ended


def test_ranks_find_that_all_of_a_pipeline_have_an_optimizer_or_that_one_has_none(tmp_path: Path) -> None:
    ranks = [MadeOptimizers(tmp_path, rank) for rank in range(3)]
    ranks[0].note(has_one=True)
    assert not ranks[2].on_all((0, 1)), "of another node, or it has not begun"
    ranks[1].note(has_one=True)
    ranks[2].note(has_one=False)
    assert [rank.on_all((0, 1)) for rank in ranks] == [True, True, True]
    ranks[2].note(has_one=True)  # made later
    assert [rank.on_all(range(3)) for rank in ranks] == [False, False, False]


def test_a_closure_runs_outside_the_optimizer_range() -> None:
    spans: list[str] = []

    class Noting(Ledger):
        @property
        def recorder(self) -> Recorder:
            return SpanLedger(spans)

    class Closing(torch.optim.Optimizer):
        def step(self, closure: Callable[[], float] | None = None) -> None:
            closure()
            spans.append("update")

    with watching(Noting()):
        optimizer = Closing([torch.zeros(1, requires_grad=True)], {})
        optimizer.step(closure=lambda: spans.append("closure") or 0.0)
    assert spans == ["+OPTIMIZER", "-", "closure", "+OPTIMIZER", "update", "-"]


class SpanLedger(Recorder):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def span(self, kind: SpanKind, step: int) -> Range:
        seen = self.seen

        class Noted:
            def __enter__(self) -> None:
                seen.append(f"+{kind}")

            def __exit__(self, *_: object) -> None:
                seen.append("-")

        return Noted()


def without_optimizer(loop: Callable[[torch.nn.Module, torch.Tensor], None]) -> int:
    """The steps that are seen in six turns of a loop that has no optimizer of torch's."""
    torch.manual_seed(0)
    with watching(Ledger()) as steps:
        model, batch = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), torch.randn(2, 4)
        for _ in range(6):
            loop(model, batch)
        steps.observer.look()
    return steps.num_steps


def update(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None


def gradients_only(model: torch.nn.Module, batch: torch.Tensor) -> None:
    model(batch).sum().backward()


def accumulating(model: torch.nn.Module, batch: torch.Tensor) -> None:
    for _ in range(3):
        model(batch).sum().backward()
    update(model)


def by_hand(model: torch.nn.Module, batch: torch.Tensor) -> None:
    """Weight gradients grow outside of a backward pass, as of one that is split, between the forwards of one step."""
    for _ in range(3):
        model(batch).sum().backward()
        for parameter in model.parameters():
            parameter.grad += 1.0
    update(model)


def validating(model: torch.nn.Module, batch: torch.Tensor) -> None:
    model(batch).sum().backward()
    update(model)
    with torch.no_grad():
        for _ in range(4):
            model(batch)


def functional(model: torch.nn.Module, batch: torch.Tensor) -> None:
    parameters = list(model.parameters())
    grads = torch.autograd.grad(model(batch).sum(), parameters)
    with torch.no_grad():
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter -= 0.1 * grad


def transformed(model: torch.nn.Module, batch: torch.Tensor) -> None:
    """Parameters of ``torch.func`` are tensors that the script replaces, and wrapped in the passes of its transforms."""
    parameters = getattr(model, "of_func", None) or {name: each.detach() for name, each in model.named_parameters()}

    def loss(values: dict[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.func.functional_call(model, values, (inputs,))
        return output.square().mean()

    halves = [torch.func.grad(loss)(parameters, inputs) for inputs in batch.split(1)]
    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, batch)
    model.of_func = {
        name: each - 0.1 * sum(half[name] for half in halves) - per_sample[name].mean(0)
        for name, each in parameters.items()
    }


def through_data(model: torch.nn.Module, batch: torch.Tensor) -> None:
    """Of the last step, nothing follows that shows its update."""
    model.zero_grad(set_to_none=False)
    model(batch).sum().backward()
    for parameter in model.parameters():
        parameter.data.sub_(0.1 * parameter.grad.data)


def two_losses(model: torch.nn.Module, batch: torch.Tensor) -> None:
    """Gradients change between the backward passes of one forward."""
    out = model(batch)
    out.sum().backward(retain_graph=True)
    grads = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    out.square().sum().backward()
    with torch.no_grad():
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter -= 0.01 * (parameter.grad + grad)
    model.zero_grad()


@pytest.mark.parametrize(
    ("loop", "num_steps"),
    [
        *((loop, 6) for loop in (accumulating, by_hand, validating, functional, transformed, two_losses)),
        *((through_data, 5), (gradients_only, 0)),
    ],
)
def test_without_an_optimizer_a_step_ends_where_backward_passes_are_followed_by_an_update(
    loop: Callable[[torch.nn.Module, torch.Tensor], None], num_steps: int
) -> None:
    assert without_optimizer(loop) == num_steps


@pytest.mark.parametrize("plain", [False, True], ids=["parameters", "plain tensors"])
def test_inputs_of_a_stage_that_are_gone_after_their_microbatch_end_no_step(plain: bool) -> None:
    """A stage by hand whose received activations are leaves with gradients: four microbatches a step."""
    weight = torch.ones(4, 4, requires_grad=True)

    def stage(model: torch.nn.Module, _: torch.Tensor) -> None:
        layer = model.get_submodule("0")
        for _microbatch in range(4):
            received = torch.ones(1, 4, requires_grad=True)
            output = received @ weight if plain else layer(received)
            torch.autograd.backward(output, torch.ones_like(output))
            del received, output
        with torch.no_grad():
            for tensor in [weight] if plain else layer.parameters():
                tensor.sub_(tensor.grad)
                tensor.grad = None

    assert without_optimizer(stage) == 6


def test_plain_tensors_that_are_replaced_end_a_step_each_time() -> None:
    weights = [torch.ones(4, requires_grad=True)]

    def replace(_: torch.nn.Module, __: torch.Tensor) -> None:
        weight = weights.pop()
        (gradient,) = torch.autograd.grad((weight * 2).sum(), weight)
        weights.append((weight - gradient).detach().requires_grad_())

    assert without_optimizer(replace) == 6


def test_backward_passes_tell_the_steps_until_an_optimizer_steps(ledger: Ledger) -> None:
    watched = torch.autograd.backward
    optimizer = make_optimizer(ledger)  # made, and for three turns of the loop not stepped
    model = torch.nn.Linear(4, 4)
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        update(model)
    model(torch.ones(1, 4))
    assert ledger.num_steps == 3
    optimizer.step()
    assert ledger.num_steps == 4
    assert torch.autograd.backward is not watched
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        update(model)
    model(torch.ones(1, 4))
    assert ledger.num_steps == 4


def test_without_modules_a_backward_pass_begins_the_next_step() -> None:
    weight = torch.randn(4, 2, requires_grad=True)

    def loop(_: torch.nn.Module, batch: torch.Tensor) -> None:
        (batch @ weight).square().sum().backward()
        weight.data.sub_(0.01 * weight.grad)
        weight.grad = None

    assert without_optimizer(loop) == 6


def test_an_iteration_whose_gradients_overflow_is_a_step(ledger: Ledger) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    moved = []
    for step in range(5):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        loss = model(torch.full((1, 4), float("inf") if step in (1, 2) else 1.0)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved.append(not torch.equal(before, model.weight))
        assert ledger.num_steps == step + 1
    assert moved == [True, False, False, True, True]


def test_a_scaler_is_as_it_was_when_nothing_is_watched_any_more(ledger: Ledger) -> None:
    watched = torch.amp.GradScaler.step
    ledger.observer.detach()
    assert torch.amp.GradScaler.step is not watched
    assert torch.amp.GradScaler.step.__module__ == "torch.amp.grad_scaler"


def test_hooks_of_all_modules_are_gone_when_the_script_compiles(ledger: Ledger) -> None:
    assert torch.nn.modules.module._has_any_global_hook()
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    assert not torch.nn.modules.module._has_any_global_hook()
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
