"""Pipelines without labels: random schedules with random work between their ops are found as they ran, or not at all."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pptrace.model.tables import COMM_ARGS, COMPUTE_KINDS
from pptrace.model.traces import Category, Trace
from pptrace.recognise.infer.evidence import Evidence, Messages, Rows
from pptrace.recognise.infer.locate_unlabelled import _are_within_stages
from pptrace.recognise.infer.match import Match, RankMatch, in_steps
from pptrace.recognise.infer.one_way import Separated
from pptrace.recognise.infer.rank_order import Ops, without_backwards_of_losses
from pptrace.recognise.run import RecognisedRun
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from tests.support.analysed import recognise
from tests.support.extent import ALL, by_turns
from tests.support.synthetic import MAIN_THREAD, START, Event, PaperRun, make_trace, run_on_paper
from tests.support.tables import table_of

NODE = "autograd::engine::evaluate_function: {}Backward0"
ACCUMULATE = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
SLOT = 10_000
"""An op's time on paper; its rows lie in the middle of it, what is no part of it before and behind."""


@dataclass(frozen=True)
class Program:
    """Program of each rank of a pipeline: ``noise`` is the chance that something runs where something may, ``numbers`` whether
    autograd's nodes are numbered, as torch does it; ``receives_without_grad`` whether receives are under torch.no_grad and so
    bear no numbers; ``sends_loss_to`` the place to which the last one sends ``loss_bytes`` after each step, −1 for none.
    Outputs have ``mask_bytes`` behind their first tensor, gradients ``gradient_bytes``; backwards
    accumulate ``gradients`` of "parameters", or of "inputs" as well. ``runs_again``: the second backward runs the nodes of the
    first once more. ``numbered``: the steps around which the profiler's range lies, from number 5 on.
    An optimizer runs, or a step's range ends (``step_ranges``), after as many ``runs`` of the plan. ``feeder``: one rank more
    sends the first one its inputs, as a frozen stage does, ``late_input``: that are read in the middle of a forward.
    No optimizer runs after the run ``skipped``. In each op ranks exchange messages with the one ``partner`` ranks away.
    The last one's loss runs backwards of its own, of ``loss_chunks``. The first one ``loads`` data before each forward, another
    thread of it does in the middle of one.
    """

    plan: Plan
    steps: int = 2
    seed: int = 0
    noise: float = 0.0
    optimizer: bool = True
    peers: bool = True
    tensors: int = 1
    evaluates: bool = False
    numbers: bool = True
    receives_without_grad: bool = False
    buckets: bool = False
    order: tuple[int, ...] = ()
    sends_loss_to: int = -1
    loss_bytes: int = 4
    mask_bytes: int = 2048
    gradient_bytes: int = 2048
    gradients: str = ""
    runs_again: bool = False
    numbered: tuple[int, ...] = ()
    runs: int = 1
    step_ranges: bool = False
    feeder: bool = False
    late_input: bool = False
    skipped: int = -1
    partner: int = 0
    loss_chunks: int = 0
    loads: bool = False
    truth: dict[tuple[int, int], str] = field(default_factory=dict)

    def traces(self) -> list[Trace]:
        run = run_on_paper(self.plan, lambda _: SLOT, latency=700)
        order = self.order or tuple(range(self.plan.pp))
        rows = [_Rank(self, run, index, order).trace() for index in range(self.plan.pp)]
        if self.feeder:
            rows.append(_Rank(self, run, 0, (self.plan.pp,)).feeding())
        return sorted(rows, key=lambda trace: trace.rank or 0)


class _Rank:
    """One rank's trace on gloo: a receive's own range lasts until the message is there."""

    def __init__(self, program: Program, run: PaperRun, index: int, order: Sequence[int]) -> None:
        self.program, self.run, self.place, self.order = program, run, index, order
        self.random = random.Random(f"{program.seed} {index}")
        self.events: list[Event] = []
        self.peers: dict[int, tuple[str, int, int]] = {}
        self.next_number = 100
        self.made: dict[int, int] = {}
        self.of_loss: dict[int, int] = {}

    def trace(self) -> Trace:
        for step in range(self.program.steps):
            at = START + step * 4 * (self.run.end + 20 * SLOT)
            self.between_steps(at - 2 * SLOT)
            if step in self.program.numbered:
                times = (at - SLOT, at + self.run.end + 5 * SLOT)
                self.events.append(Event(Category.ANNOTATION, f"ProfilerStep#{5 + step}", *times, thread=MAIN_THREAD))
            if self.program.evaluates and step:
                self.evaluation(at - 2 * self.run.end - 18 * SLOT)
            for index, done in enumerate(self.run.ranks[self.place]):
                if done.action.kind.is_compute:
                    self.op(done.action.kind, step, done.action.microbatch or 0, at + done.start)
                else:
                    position = sum(other.group == done.group for other in self.run.ranks[self.place][:index])
                    self.message(done.action.kind, at + done.start + 50 * position, at + done.end)
            self.after(at + self.run.end + 100, step)
        trace = make_trace(self.events, self.order[self.place])
        return self.with_peers(trace) if self.program.peers else trace

    def feeding(self) -> Trace:
        """The trace of a rank that sends an input for each forward of the first one, and computes it before."""
        for step in range(self.program.steps):
            at = START + step * 4 * (self.run.end + 20 * SLOT)
            for done in self.run.ranks[0]:
                if done.action.kind is Kind.F:
                    self.operator("aten::mm", at + done.start - 3000, at + done.start - 2000)
                    self.tensor("c10d::send", "gloo:send", 0, at + done.start + 1000, at + done.start + 1600)
        trace = make_trace(self.events, self.order[0])
        return self.with_peers(trace)

    def operator(self, name: str, start: int, end: int, number: int = -1) -> None:
        number = number if self.program.numbers else -1
        self.events.append(Event(Category.CPU_OP, name, start, end, thread=MAIN_THREAD, correlation=number))

    def op(self, kind: Kind, step: int, microbatch: int, start: int) -> None:
        """Few operators, of which a backward may have one alone; around them what an op does not consist of."""
        self.maybe_noise(start + 100, 8)
        is_fed = kind is Kind.F and self.program.feeder and not self.place
        if is_fed and not self.program.late_input:
            self.operator("aten::normal_", start + 100, start + 150)  # what is received is made first
            self.tensor("c10d::recv_", "gloo:recv", self.program.plan.pp, start + 200, start + 1700)
        if kind is Kind.F and self.program.loads and not self.place:
            self.load(start)
        name = "aten::mm" if kind is Kind.F else NODE.format("Mm")
        count = 1 if self.random.random() < 0.3 and kind is not Kind.F and not self.program.partner else 3
        if kind is Kind.F:
            self.made[microbatch] = self.next_number
            self.next_number += 1
            if is_fed and self.program.late_input:
                self.tensor("c10d::recv_", "gloo:recv", self.program.plan.pp, start + 3920, start + 3990)
            self.next_number += 2
        first = self.made[0 if self.program.runs_again and microbatch == 1 else microbatch]
        for index in range(count):
            number = -1 if kind is Kind.F else first + 2 - index
            self.operator(name, start + 3000 + 1000 * index, start + 3900 + 1000 * index, number)
        if self.program.partner:
            partner = self.order[self.place] + self.program.partner
            self.tensor("c10d::send", "gloo:send", partner, start + 3910, start + 3990)
            self.tensor("c10d::recv_", "gloo:recv", partner, start + 3930, start + 3990)
        self.program.truth[self.order[self.place], start + 3000] = f"{self.place}{kind}{microbatch} {step}"
        if kind is Kind.B and self.program.gradients:
            self.accumulate(start + 6000, is_first=microbatch == 0)
        if self.program.loss_chunks and self.place == self.program.plan.pp - 1:
            if kind is Kind.F:
                self.chunked_loss(microbatch, start + 6000)
            else:
                self.operator(NODE.format("Known"), start + 2900, start + 2990, self.of_loss[microbatch])
        if kind is Kind.F:
            self.operator("aten::detach", start + 7000, start + 7010)
        elif self.program.buckets and microbatch == self.program.plan.num_microbatches - 1:
            self.operator("torch.distributed.ddp.reducer::copy_bucket_to_grad", start + 8000, start + 8100)

    def accumulate(self, start: int, is_first: bool) -> None:
        """Two gradients of parameters, which are new in a step's first backward, and that of the input, which is new in each."""
        is_new = [is_first, is_first] + [True] * (self.program.gradients == "inputs" and self.place > 0)
        for index, new in enumerate(is_new):
            begin = start + 100 * index
            self.operator(ACCUMULATE, begin, begin + 80)
            self.operator("aten::detach" if new else "aten::add_", begin + 20, begin + 60)

    def load(self, start: int) -> None:
        self.operator("aten::empty", start + 100, start + 150)
        self.operator("aten::ne", start + 200, start + 300)
        self.operator("aten::stack", start + 1200, start + 1300)
        for thread, begin, end in ((MAIN_THREAD, 1000, 2000), (MAIN_THREAD + 1, 3920, 3980)):
            times = (start + begin, start + end)
            self.events.append(Event(Category.ANNOTATION, "get_batch", *times, thread=thread))

    def chunked_loss(self, microbatch: int, start: int) -> None:
        """A head's forward and backward, chunk by chunk, and the node that knows the sum of the gradients."""
        for index in range(self.program.loss_chunks):
            begin = start + 100 * index
            self.operator("aten::linear", begin, begin + 40, self.next_number)
            self.next_number += 2
            self.operator(NODE.format("Mean"), begin + 50, begin + 60, self.next_number - 1)
            self.operator(NODE.format("Addmm"), begin + 60, begin + 80, self.next_number - 2)
            self.operator(ACCUMULATE, begin + 80, begin + 90)
        self.operator("Known", start + 900, start + 950, self.next_number)
        self.of_loss[microbatch] = self.next_number
        self.next_number += 1

    def maybe_noise(self, start: int, most: int) -> None:
        if self.random.random() < self.program.noise:
            for index in range(self.random.randint(1, most)):
                self.operator("aten::zero_", start + 300 * index, start + 300 * index + 250)

    def message(self, kind: Kind, start: int, end: int) -> None:
        name, work = ("c10d::send", "gloo:send") if kind.is_send else ("c10d::recv_", "gloo:recv")
        away = 1 if kind in (Kind.SEND_F, Kind.RECV_B) else -1
        for tensor in range(self.program.tensors):
            begin = start + 20 * tensor + (0 if kind.is_send else 200)
            is_numbered = kind.is_send or not self.program.receives_without_grad
            output = self.program.mask_bytes if tensor else 2048
            size = output if kind in (Kind.SEND_F, Kind.RECV_F) else self.program.gradient_bytes
            self.tensor(name, work, self.order[self.place + away], begin, end, is_numbered, size)

    def tensor(
        self, name: str, work: str, peer: int, begin: int, end: int, is_numbered: bool = True, size: int = 2048
    ) -> None:
        self.operator(name, begin, begin + 10, self.next_number if is_numbered else -1)
        self.peers[begin] = (name, peer, size)
        self.events.append(Event(Category.ANNOTATION, work, begin + 5, end, thread=MAIN_THREAD))

    def loss(self, start: int) -> None:
        to, last, size = self.program.sends_loss_to, self.program.plan.pp - 1, self.program.loss_bytes
        if to >= 0 and self.place == last:
            self.tensor("c10d::send", "gloo:send", self.order[to], start, start + 60, size=size)
        elif self.place == to:
            self.tensor("c10d::recv_", "gloo:recv", self.order[last], start + 20, start + 90, size=size)

    def between_steps(self, start: int) -> None:
        self.maybe_noise(start - 30 * SLOT, 40)
        if self.random.random() < self.program.noise:
            self.operator("c10d::barrier", start, start + 50)

    def after(self, start: int, step: int) -> None:
        self.loss(start - 95)
        self.maybe_noise(start, 40)
        if (step + 1) % self.program.runs:
            return
        if self.program.step_ranges:
            number = step // self.program.runs
            begin = START + number * self.program.runs * 4 * (self.run.end + 20 * SLOT) - 4 * SLOT
            name = f"ProfilerStep#{number + 7}"
            self.events.append(Event(Category.ANNOTATION, name, begin, start + 3 * SLOT, thread=MAIN_THREAD))
        if self.program.optimizer and step != self.program.skipped:
            times = (start + SLOT, start + 2 * SLOT)
            self.events.append(Event(Category.ANNOTATION, "Optimizer.step#SGD.step", *times, thread=MAIN_THREAD))
            self.operator("aten::_foreach_add_", start + SLOT + 10, start + 2 * SLOT - 10)

    def evaluation(self, at: int) -> None:
        """Three forwards, of which nothing comes back."""
        for microbatch in range(3):
            start = at + microbatch * 2 * SLOT + self.place * SLOT
            if self.place:
                self.message(Kind.RECV_F, start - 1000, start)
            self.operator("aten::mm", start + 3000, start + 3900)
            self.operator("aten::mm", start + 4000, start + 4900)
            if self.place < self.program.plan.pp - 1:
                self.message(Kind.SEND_F, start + 5000, start + SLOT)

    def with_peers(self, trace: Trace) -> Trace:
        events = trace.events
        rows = []
        for index, (start, code) in enumerate(zip(events.start_ns.tolist(), events.name_id.tolist(), strict=True)):
            name, peer, size = self.peers.get(start, ("", -1, -1))
            if peer >= 0 and events.names[code] == name:
                end = "dst" if name == "c10d::send" else "src"
                rows.append({"event": index, end: peer, "in_bytes": size, "out_bytes": size})
        return replace(trace, events=replace(events, comm_args=table_of(COMM_ARGS, rows, -1)))


def found_ops(run: RecognisedRun) -> dict[tuple[int, int], str]:
    """Texts of the ops that have all: by rank and the first row that computes."""
    ops = run.ops[run.ops["kind"].isin(COMPUTE_KINDS) & (run.ops["stage"] >= 0) & (run.ops["microbatch"] >= 0)]
    columns = zip(
        ops["rank"], ops["start_ns"], ops["end_ns"], ops["kind"], ops["stage"], ops["microbatch"], strict=True
    )
    return {(rank, start, end): f"{stage}{kind}{number}" for rank, start, end, kind, stage, number in columns}


def check_never_wrong(program: Program, run: RecognisedRun) -> int:
    """Each op that has a name has the right one; how many have.

    A recording may begin within its first op, whose start is not in it then.
    """
    ops = found_ops(run)
    first = {rank: min(start for r, start, _ in ops if r == rank) for rank, _, _ in ops}
    for (rank, start, end), name in ops.items():
        begin = start - SLOT // 2 if start == first[rank] else start
        inside = [text for (r, at), text in program.truth.items() if r == rank and begin <= at < end]
        assert [text.split()[0] for text in inside] == [name], (rank, start, end)
    return len(ops)


PLANS = st.builds(
    lambda name, pp, extra: build(name, pp, pp + extra),
    st.sampled_from(["1f1b", "gpipe", "eager-1f1b"]),
    st.integers(2, 4),
    st.integers(0, 4),
)


@settings(max_examples=15 if ALL else 8, deadline=None)
@given(PLANS, st.integers(0, 1000), st.sampled_from([0.0, 0.3, 1.0]), st.booleans(), st.booleans(), st.integers(1, 2))
def test_every_op_is_found_whatever_runs_between_the_ops(
    plan: Plan, seed: int, noise: float, optimizer: bool, peers: bool, tensors: int
) -> None:
    program = Program(plan, 2, seed, noise, optimizer, peers, tensors)
    run = recognise(program.traces())
    count = check_never_wrong(program, run)
    if plan.name == "eager-1f1b" and not count:
        return  # it receives ahead and sends both ways at once: nothing tells which is which
    assert count == len(program.truth)
    assert run.mesh.pp == plan.pp
    assert (run.comms.loc[run.comms["axis"] == "pp", "match"] >= 0).all()
    steps = run.ops.loc[run.ops["kind"].isin(COMPUTE_KINDS), "step"]
    assert set(steps) == {0, 1}
    assert run.schedule.name == plan.name or plan.num_microbatches < 3


def test_the_last_backward_of_ddp_ends_where_its_buckets_are_there() -> None:
    program = Program(build("1f1b", 2, 4), buckets=True)
    ops = found_ops(recognise(program.traces()))
    assert {end - start for (_, start, end), name in ops.items() if name.endswith("B3")} == {5100}
    assert len(ops) == len(program.truth)


@pytest.mark.parametrize("ranks", [(0, 1, 2), (2,)])
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_backwards_that_a_loss_runs_of_its_own_are_of_its_forward(
    name: str, chunks: int, ranks: tuple[int, ...]
) -> None:
    """As torchtitan's, chunk by chunk. Its backward begins where the engine runs what the loss has left."""
    program = Program(build(name, 3, 5), 3, noise=0.3, loss_chunks=chunks, gradients="inputs")
    traces = program.traces()
    run = recognise([traces[rank] for rank in ranks], num_ranks=3)
    ops = run.ops[run.ops["kind"].isin(COMPUTE_KINDS) & (run.ops["rank"] == 2)]
    starts = {at: text for (rank, at), text in program.truth.items() if rank == 2}
    assert len(ops) == len(starts) == 30
    for op in ops.itertuples():
        if op.kind == "F":
            assert starts[op.start_ns].startswith(f"2F{op.microbatch} ")
            assert op.end_ns - op.start_ns >= 3950, "until the loss is over"
        else:
            assert starts[op.start_ns + 100].startswith(f"2B{op.microbatch} ")


@pytest.mark.parametrize(
    ("numbers", "kept"),
    [
        ([8, 7, 6, 5, 4], 5),  # scaled between two parts of one backward
        ([8, 7, 9, 5, 4], 3),  # a loss that ran its own
        ([5, 4, 9, 8, 7], 5),  # another model's, behind the pipeline's
        ([-1, -1, -1, -1, -1], 5),
    ],
)
def test_what_a_backward_runs_in_parts_is_a_losss_own_only_if_more_was_made_meanwhile(
    numbers: list[int], kept: int
) -> None:
    """Two nodes, of which the first adds up a gradient, an operator, and three nodes; then a gradient is sent back."""
    none = np.zeros(0, dtype=np.int64)
    starts = np.array([10, 20, 40, 50, 60])
    nodes = Rows(starts, starts + 5, starts, np.array(numbers))
    operators = Rows(np.array([0, 30]), np.array([9, 39]), np.array([1, 2]), np.array([4, 9]))
    sent = Messages(none, none, none, np.array([70]), np.array([71]))
    evidence = Evidence(
        0, sent, sent, operators, nodes, nodes.where(starts == 10), nodes.where(starts < 0), none, none, none
    )
    found = without_backwards_of_losses(evidence, sent)
    assert found.engine.start_ns.tolist() == starts[-kept:].tolist()
    assert len(found.gradients.start_ns) == (kept == 5)


@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_runs_until_an_optimizer_or_the_end_of_a_range_are_one_step(name: str, optimizer: bool) -> None:
    """Gradients that are accumulated over two calls of a schedule."""
    program = Program(build(name, 3, 4), 6, optimizer=optimizer, runs=2, step_ranges=not optimizer)
    run = recognise(program.traces())
    ops = run.ops[run.ops["kind"].isin(COMPUTE_KINDS)]
    assert len(ops) == len(program.truth)
    for op in ops.itertuples():
        (text,) = (
            text for (rank, at), text in program.truth.items() if rank == op.rank and op.start_ns <= at < op.end_ns
        )
        done, of_run = text.split()
        assert (op.step, op.microbatch) == (
            int(of_run) // 2 + 7 * (not optimizer),
            int(done[-1]) + 4 * (int(of_run) % 2),
        )
    assert (run.schedule.name, run.schedule.mismatches) == ("custom", ())
    assert run.schedule.plan is not None
    assert run.schedule.plan.num_microbatches == 8
    assert any(
        f"each step runs {name} 2 times, one after the other, with 4 microbatches each" in line for line in run.warnings
    )
    assert any(f"3 steps, in all 6 runs of {name} with 4 microbatches," in line for line in run.warnings)


def test_updates_tell_no_steps_of_a_trace_that_ends_within_one() -> None:
    run = recognise(Program(build("1f1b", 3, 4), 7, runs=2).traces())
    assert set(run.ops.loc[run.ops["kind"].isin(COMPUTE_KINDS), "step"]) == set(range(7))
    assert run.schedule.name == "1f1b"


def test_updates_on_the_ranks_of_one_pipeline_tell_the_steps_of_all() -> None:
    """As where the optimizer runs on one replica, which sends its weights to the others."""

    def match_of(rank: int, sizes: tuple[int, ...]) -> Match:
        starts = np.arange(sum(sizes)) * 10 + rank
        ops = Ops(starts, starts + 1, starts, starts + 5)
        return Match((RankMatch(rank, 0, ops, ops, {}, {}, {}),), sizes, np.arange(sum(sizes)))

    ends = {0: np.array([38, 78, 118]), 1: np.zeros(0, dtype=np.int64)}
    in_two = in_steps([match_of(0, (2,) * 6), match_of(1, (2,) * 6)], ends, are_updates=True)
    assert [match.sizes for match in in_two] == [(4, 4, 4)] * 2
    unlike = [match_of(0, (2,) * 6), match_of(1, (3,) * 4)]
    assert in_steps(unlike, ends, are_updates=True) == unlike
    as_many = in_steps([unlike[0], match_of(1, (3,) * 3)], ends, are_updates=True)
    assert [match.sizes for match in as_many] == [(4, 4, 4), (3, 3, 3)]


@pytest.mark.parametrize("skipped", [0, 1, 3, 5])
def test_an_update_that_is_left_out_makes_no_step_longer(skipped: int) -> None:
    """As where gradients overflow: each run of the schedule is a step then."""
    run = recognise(Program(build("1f1b", 3, 4), 6, skipped=skipped).traces())
    assert set(run.ops.loc[run.ops["kind"].isin(COMPUTE_KINDS), "step"]) == set(range(6))
    assert run.schedule.name == "1f1b"


@pytest.mark.parametrize("late_input", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_a_first_stage_does_not_begin_before_an_input_that_no_gradient_answers(name: str, late_input: bool) -> None:
    """A stage with frozen weights runs no backward: what it sends is of no op, and waiting for it is no forward. An input in the
    middle of a forward parts nothing.
    """
    program = Program(build(name, 3, 5), 3, feeder=True, late_input=late_input)
    run = recognise(program.traces())
    assert check_never_wrong(program, run) == len(program.truth)
    forwards = run.ops[(run.ops["kind"] == "F") & (run.ops["rank"] == 0)]
    assert len(forwards) == 15
    assert set(zip(forwards["rank"], forwards["start_ns"], strict=True)) <= set(program.truth)
    assert any(
        "ranks without an op that send to others: 3; of stages without a backward" in line for line in run.warnings
    )


@pytest.mark.parametrize("ranks", [(0, 1), (0,)])
def test_a_first_stages_forward_begins_behind_what_loads_its_data(ranks: tuple[int, ...]) -> None:
    program = Program(build("1f1b", 2, 4), 3, loads=True)
    traces = program.traces()
    run = recognise([traces[rank] for rank in ranks], num_ranks=2)
    forwards = run.ops[(run.ops["kind"] == "F") & (run.ops["rank"] == 0)]
    assert len(forwards) == 12
    assert {(0, start) for start in forwards["start_ns"]} <= set(program.truth)
    assert (run.ops["kind"] == "DATA").sum() == 12, "what another thread loads keeps this one from nothing"


@pytest.mark.parametrize("to", [0, 1])
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_messages_that_are_never_answered_are_of_no_op(name: str, to: int) -> None:
    program = Program(build(name, 4, 6), 3, sends_loss_to=to)
    run = recognise(program.traces())
    assert check_never_wrong(program, run) == len(program.truth)
    assert run.schedule.name == name
    assert run.mesh.pipelines == ((0, 1, 2, 3),)
    losses = run.comms[(run.comms["rank"] == 3) & (run.comms["peer"] == to)]
    assert losses[["kind", "step", "microbatch"]].to_numpy().tolist() == [["send", step, -1] for step in range(3)]
    assert (run.comms["match"] >= 0).all()
    assert f"messages to ranks that never answer are of no op: 3 from rank 3 to rank {to}" in run.warnings


@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("seed", range(3))
def test_losses_that_go_the_way_of_gradients_are_told_by_their_size(name: str, pp: int, seed: int) -> None:
    program = Program(build(name, pp, 6), 3, seed, noise=0.3, sends_loss_to=pp - 2)
    run = recognise(program.traces())
    assert check_never_wrong(program, run) == len(program.truth)
    assert run.schedule.name == name
    losses = run.comms[(run.comms["bytes"] == 4) & (run.comms["kind"] == "send")]
    assert losses[["rank", "step", "microbatch"]].to_numpy().tolist() == [[pp - 1, step, -1] for step in range(3)]
    assert (run.comms.loc[run.comms["axis"] == "pp", "match"] >= 0).all()
    line = f"messages of a size that never comes back are of no op: 3 of 4 bytes from rank {pp - 1} to rank {pp - 2}"
    assert line in run.warnings


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_losses_of_the_size_of_gradients_are_never_taken_for_them(name: str) -> None:
    program = Program(build(name, 2, 6), 3, sends_loss_to=0, loss_bytes=2048)
    check_never_wrong(program, recognise(program.traces()))


@pytest.mark.parametrize("inner", ["pipeline", "ring"])
@pytest.mark.parametrize(("name", "pp"), [("1f1b", 2), ("gpipe", 2), ("1f1b", 3)])
def test_rings_inside_ops_and_a_pipeline_are_told_by_the_distance_of_their_ranks(
    name: str, pp: int, inner: str
) -> None:
    """As of context parallelism: two replicas of a pipeline, whose ranks exchange messages of the same size in each op."""
    apart, away = (2, 1) if inner == "ring" else (1, pp)
    orders = [tuple(range(first, first + apart * pp, apart)) for first in (0, away)]
    programs = [Program(build(name, pp, 4), 3, order=orders[0], partner=away)]
    programs.append(Program(build(name, pp, 4), 3, order=orders[1], partner=-away, truth=programs[0].truth))
    run = recognise(sorted((trace for program in programs for trace in program.traces()), key=lambda t: t.rank or 0))
    assert check_never_wrong(programs[0], run) == len(programs[0].truth)
    assert run.schedule.name == name
    assert run.mesh.pipelines == tuple(orders)
    rings = run.comms[run.comms["axis"] == "cp"]
    assert len(rings) == 2 * len(programs[0].truth)
    assert run.mesh.size_of("cp") == 2
    assert ((rings["step"] >= 0) & (rings["match"] >= 0) & (rings["microbatch"] == -1)).all()
    assert any(f"ranks that are not {apart} apart are inside ops: 24 from rank 0" in line for line in run.warnings)


def test_messages_with_ranks_of_no_pipeline_are_not_those_of_context_parallelism() -> None:
    """Ranks 0 and 2, which run no backward, exchange messages with those of a pipeline, and none with each other."""
    pipeline = Program(build("1f1b", 2, 4), 3, order=(1, 3), partner=-1)
    traces = pipeline.traces()
    for number in (0, 2):
        program = Program(build("1f1b", 1, 4), 3, order=(number,), partner=1)
        rank = _Rank(program, run_on_paper(program.plan, lambda _: SLOT, latency=700), 0, program.order)
        rank.trace()
        forwards = [event for event in rank.events if not event.name.startswith("autograd")]
        traces.append(rank.with_peers(make_trace(forwards, number)))
    run = recognise(sorted(traces, key=lambda trace: trace.rank or 0))
    assert check_never_wrong(pipeline, run) == len(pipeline.truth)
    assert "cp" not in set(run.comms["axis"])


@pytest.mark.parametrize(("size", "microbatches"), [(8192, 5), (512, 5), (2048, 1)])
@pytest.mark.parametrize("ranks", [(0, 1, 2), (0,), (1,), (2,)])
def test_gradients_are_of_inputs_and_may_have_another_dtype(
    size: int, microbatches: int, ranks: tuple[int, ...]
) -> None:
    plan = build("gpipe", 3, microbatches)
    traces = Program(plan, tensors=2, mask_bytes=65536, gradient_bytes=size, gradients="inputs").traces()
    run = recognise([traces[rank] for rank in ranks], num_ranks=3)
    assert len(run.ops[run.ops["kind"].isin(COMPUTE_KINDS)]) == 4 * microbatches * len(ranks)


@pytest.mark.parametrize(
    ("gradients", "size", "ranks", "reason"),
    [
        ("inputs", 8193, (0,), "exchanges messages of 2048 bytes for such of 8193: no outputs and gradients"),
        ("inputs", 511, (2,), "exchanges messages of 2048 bytes for such of 511: no outputs and gradients"),
        ("inputs", 511, (0, 1, 2), "rank 0 exchanges messages of 2048 bytes for such of 511"),
        ("parameters", 2048, (2,), "the backwards of rank 2 make gradients of parameters alone"),
        ("parameters", 2048, (0, 1, 2), "the backwards of rank 1 make gradients of parameters alone"),
    ],
)
def test_what_goes_back_but_is_no_gradient_of_what_came_makes_no_pipeline(
    gradients: str, size: int, ranks: tuple[int, ...], reason: str
) -> None:
    """A student that answers its teacher's logits with its loss, or its features; sums that go along a chain and back."""
    traces = Program(build("1f1b", 3, 5), gradients=gradients, gradient_bytes=size).traces()
    run = recognise([traces[rank] for rank in ranks], num_ranks=3)
    assert run.ops[run.ops["kind"].isin(COMPUTE_KINDS)].empty
    assert any(reason in line for line in run.warnings)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_evaluation_between_steps_is_of_none(name: str) -> None:
    program = Program(build(name, 3, 5), 3, evaluates=True, noise=0.5)
    run = recognise(program.traces())
    assert check_never_wrong(program, run) == len(program.truth)
    assert run.schedule.name == name
    assert run.schedule.mismatches == ()


@pytest.mark.parametrize(("order", "peers"), by_turns([(2, 1, 0), (0, 2, 1), (1, 2, 0)], [True, False]))
def test_stages_need_not_lie_on_the_ranks_in_their_order(order: tuple[int, ...], peers: bool) -> None:
    program = Program(build("1f1b", 3, 6), 2, peers=peers, order=order)
    run = recognise(program.traces())
    assert check_never_wrong(program, run) == len(program.truth)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("pp", [2, 3])
def test_receives_without_numbers_leave_the_order_to_the_ranks_that_tell_it(name: str, pp: int) -> None:
    program = Program(build(name, pp, 4), receives_without_grad=True)
    run = recognise(program.traces())
    assert check_never_wrong(program, run) == len(program.truth)
    assert run.schedule.name == name


@pytest.mark.parametrize("ranks", [(0, 1), (0,), (1,)])
def test_of_two_backwards_of_one_forward_no_op_is_shown(ranks: tuple[int, ...]) -> None:
    traces = Program(build("1f1b", 2, 4), runs_again=True).traces()
    run = recognise([traces[rank] for rank in ranks], num_ranks=2)
    assert not run.ops["kind"].isin(COMPUTE_KINDS).any()
    assert any("two backwards run what one forward made" in line for line in run.warnings)


@pytest.mark.parametrize(("numbered", "steps"), [((0, 1), {5, 6}), ((0,), {0, 1}), ((1,), {0, 1})])
def test_steps_have_the_numbers_of_their_ranges_where_each_has_one(numbered: tuple[int, ...], steps: set[int]) -> None:
    run = recognise(Program(build("1f1b", 2, 4), numbered=numbered).traces())
    assert set(run.ops.loc[run.ops["kind"].isin(COMPUTE_KINDS), "step"]) == steps


Damage = Callable[[random.Random, list[Event]], list[Event]]


def without_a_message(rng: random.Random, events: list[Event]) -> list[Event]:
    lost = rng.choice([event for event in events if event.name in ("c10d::send", "c10d::recv_")])
    return [event for event in events if event is not lost]


def without_a_node(rng: random.Random, events: list[Event]) -> list[Event]:
    nodes = [event for event in events if event.name.startswith("autograd::")]
    lost = rng.choice(nodes)
    return [event for event in events if event.name != lost.name or abs(event.start - lost.start) > SLOT // 2]


def cut_off(rng: random.Random, events: list[Event]) -> list[Event]:
    last = rng.choice(events).start
    return [event for event in events if event.start <= last]


def cut_on(rng: random.Random, events: list[Event]) -> list[Event]:
    first = rng.choice(events).start
    return [event for event in events if event.start >= first]


@settings(max_examples=10 if ALL else 6, deadline=None)
@given(PLANS, st.integers(0, 1000), st.sampled_from([0.3, 1.0]), st.booleans())
def test_without_numbers_of_nodes_an_op_is_right_or_null(plan: Plan, seed: int, noise: float, peers: bool) -> None:
    program = Program(plan, 2, seed, noise, peers=peers, numbers=False)
    count = check_never_wrong(program, recognise(program.traces()))
    assert count in (0, len(program.truth) // 2, len(program.truth))  # of two steps, none, one or both


@settings(max_examples=20 if ALL else 10, deadline=None)
@given(
    PLANS,
    st.integers(0, 1000),
    st.sampled_from([without_a_message, without_a_node, cut_off, cut_on]),
    st.booleans(),
    st.floats(0, 1),
)
@example(build("gpipe", 2, 3), 5, without_a_node, False, 0.0)  # its gradient went with its neighbour's
@example(build("gpipe", 2, 6), 5, without_a_node, False, 0.0)
@example(build("1f1b", 2, 2), 267, cut_on, False, 0.0)  # the recording begins within an op
def test_damage_on_one_rank_never_makes_an_op_another(
    plan: Plan, seed: int, damage: Damage, optimizer: bool, noise: float
) -> None:
    program = Program(plan, 2, seed, noise, optimizer, peers=False, numbers=seed % 2 == 0)
    rng = random.Random(seed)
    run = run_on_paper(plan, lambda _: SLOT, latency=700)
    hurt = rng.randrange(plan.pp)
    traces = []
    for index in range(plan.pp):
        rank = _Rank(program, run, index, range(plan.pp))
        trace = rank.trace()
        traces.append(make_trace(damage(rng, rank.events), index) if index == hurt else trace)
    check_never_wrong(program, recognise(traces))


@pytest.mark.parametrize("peers", [True, False])
def test_whom_messages_go_to_is_said_to_be_assumed_where_none_names_a_peer(peers: bool) -> None:
    plan = build("1f1b", 3, 5)
    program = Program(plan, 2, optimizer=False, peers=peers)
    traces = program.traces()
    rank = _Rank(program, run_on_paper(plan, lambda _: SLOT, latency=700), 1, range(3))
    rank.trace()
    last = [event for event in rank.events if event.name == "c10d::send"][-1]
    lost = make_trace([event for event in rank.events if not last.start <= event.start < last.start + SLOT], 1)
    run = recognise([traces[0], rank.with_peers(lost) if peers else lost, traces[2]])
    (line,) = (line for line in run.warnings if "messages to rank" in line)
    assert line.endswith("(on gloo record_shapes=True names peers)") is not peers


def spmd(rank: int, kinds: Sequence[str]) -> Trace:
    """Trace of what every rank does alike, or in turn: sends (S), receives (R), operators (C) and a backward (E)."""
    rows: list[Event] = []
    at = START
    for kind in kinds * 6:
        name = {
            "S": "c10d::send",
            "R": "c10d::recv_",
            "C": "aten::mm",
            "E": NODE.format("Mm"),
            "O": "Optimizer.step#SGD.step",
        }
        category = Category.ANNOTATION if kind == "O" else Category.CPU_OP
        rows.append(Event(category, name[kind], at, at + 50, thread=MAIN_THREAD))
        if kind == "R":
            rows.append(Event(Category.ANNOTATION, "gloo:recv", at + 20, at + 90, thread=MAIN_THREAD))
        at += 100
    return make_trace(rows, rank)


@pytest.mark.parametrize(
    "programs",
    [
        ("CSRCEO", "CSRCEO"),  # an exchange in the forward
        ("CSRCEO", "CRSCEO"),  # in turn
        ("CESRO", "CERSO"),  # weights after the backward, in turn
        ("SRO", "RCES"),  # a server of parameters
        ("CSR", "RCEOS"),  # one acts, one learns
        ("CSRCEO", "CRCESO"),  # each learns from the other
        ("CSRCSRCEO", "CSRCSRCEO"),  # a ring in two layers
    ],
)
def test_messages_of_what_is_no_pipeline_are_of_no_op(programs: tuple[str, ...]) -> None:
    run = recognise([spmd(rank, kinds) for rank, kinds in enumerate(programs)])
    assert not run.ops["kind"].isin(COMPUTE_KINDS).any()
    assert run.schedule.plan is None
    assert set(run.comms["kind"]) == {"send", "recv"}
    assert any("not one stage of a pipeline on each rank" in line for line in run.warnings)


@pytest.mark.parametrize("optimizer", [True, False])
def test_one_rank_whose_order_tells_no_ops_says_that_the_others_would(optimizer: bool) -> None:
    traces = Program(build("1f1b", 4, 8), noise=0.9, peers=False, optimizer=optimizer, numbers=False).traces()
    alone = recognise(traces[1:2], num_ranks=4)
    assert not alone.ops["kind"].isin(COMPUTE_KINDS).any()
    assert any("give the traces of the other ranks" in line for line in alone.warnings)
    together = recognise(traces)
    assert together.schedule.name == "1f1b"
    assert not any("give the traces of the other ranks" in line for line in together.warnings)


def test_messages_of_a_rank_in_no_pipeline_are_not_within_a_stage() -> None:
    number = np.zeros(1, dtype=np.int64)

    def others(*links: tuple[int, int]) -> Separated:
        to = {rank: {"send": Messages(number, number + peer, number, number, number)} for rank, peer in links}
        return Separated({}, to, ())

    chains = ((0, 1), (2, 3))
    assert _are_within_stages(others((0, 2), (1, 3)), chains)
    assert not _are_within_stages(others((0, 2), (2, 3)), chains)
    assert not _are_within_stages(others((0, 2), (4, 5)), chains), "neither of the two is in a pipeline"
