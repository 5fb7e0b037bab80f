"""One class per way in which a framework shows a step: what its ranks put into a trace, as ranges, launches and kernels.

The machine under all of them: the host runs ahead of the device by :data:`LEAD`; the main thread launches forwards and weight
gradients, autograd's the backwards, and a group of messages is one NCCL kernel that spins until its data has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pptrace.marks import Axis, OpMark, P2PMark, Transfer, format_mark
from pptrace.model.traces import Category
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.messages import peer_of
from pptrace.schedule.plan import Plan
from tests.support.synthetic import (
    AUTOGRAD_THREAD,
    COMPUTE_STREAM,
    LEAD,
    MAIN_THREAD,
    NCCL_STREAM,
    Done,
    Event,
    PaperRun,
    groups_of,
)

ALL_ONE_CHUNK = ("gpipe", "1f1b", "eager-1f1b")
KERNELS = (
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, false>(int, float)",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<float, float> >"
    "(at::TensorIteratorBase&)::{lambda(int)#1}>(int, {lambda(int)#1})",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128_32x4_nn_align8>(Params)",
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)::"
    "[lambda() (instance 2)]::operator()() const::[lambda(c10::BFloat16) (instance 1)], std::array<char*, 2> >(int)",
)
"""Of an op, as they are called in traces."""
CPU_THREADS = {Kind.F: MAIN_THREAD, Kind.W: MAIN_THREAD}


@dataclass
class Host:
    """Collects the events of one rank's step, whose times begin at ``at``."""

    at: int
    first_correlation: int
    events: list[Event] = field(default_factory=list)

    def range(self, name: str, start: int, end: int, thread: int = MAIN_THREAD) -> None:
        self.events.append(Event(Category.ANNOTATION, name, self.at + start, self.at + end, thread=thread))

    def operator(self, name: str, start: int, end: int, thread: int = MAIN_THREAD) -> None:
        self.events.append(Event(Category.CPU_OP, name, self.at + start, self.at + end, thread=thread))

    def launch(self, name: str, begin: int, start: int, end: int, thread: int, stream: int = COMPUTE_STREAM) -> None:
        number = self.first_correlation + len(self.events)
        call = (self.at + begin, self.at + begin + 1)
        self.events.append(Event(Category.RUNTIME, "cudaLaunchKernel", *call, thread=thread, correlation=number))
        span = (self.at + start, self.at + end)
        self.events.append(Event(Category.KERNEL, name, *span, 0, stream, correlation=number))


class Style:
    """Writer of traces in general; a style overrides what its framework names."""

    framework: ClassVar[str] = "unlabelled"
    schedules: ClassVar[tuple[str, ...]] = ALL_ONE_CHUNK
    messages_named: ClassVar[bool] = False  # each message has its microbatch and stage
    has_operators: ClassVar[bool] = False

    def step(self, run: PaperRun, rank: int, number: int, at: int) -> list[Event]:
        """Everything of a rank's step ``number``, that begins at ``at``."""
        host = Host(at, 1 + (rank * 100 + number) * 10_000)
        for group in groups_of(run.ranks[rank]):
            if group[0].action.kind.is_p2p:
                self.messages(host, run.plan, rank, group)
            else:
                self.op(host, run.plan, rank, group[0])
        self.finish(host, run, rank, number)
        return host.events

    def op(self, host: Host, plan: Plan, rank: int, done: Done) -> None:
        begin = done.start - LEAD
        if name := self.op_name(plan, rank, done.action):
            host.range(name, begin, begin + 20)
        self.launch_op(host, done)

    def launch_op(self, host: Host, done: Done) -> None:
        """Five kernels without a gap; a backward's are launched by autograd."""
        begin, thread = done.start - LEAD, CPU_THREADS.get(done.action.kind, AUTOGRAD_THREAD)
        cuts = [done.start + (done.end - done.start) * k // 5 for k in range(6)]
        for index in range(5):
            host.launch(KERNELS[index], begin + 2 + 2 * index, cuts[index], cuts[index + 1], thread)

    def op_name(self, plan: Plan, rank: int, action: Action) -> str:
        return ""

    def messages(self, host: Host, plan: Plan, rank: int, group: Sequence[Done]) -> None:
        begin = group[0].start - LEAD
        if name := self.messages_name(plan, rank, [done.action for done in group]):
            host.range(name, begin, begin + 20)
        end = max(done.end for done in group)
        host.launch("ncclDevKernel_SendRecv", begin + 5, group[0].start, end, MAIN_THREAD, NCCL_STREAM)

    def messages_name(self, plan: Plan, rank: int, actions: Sequence[Action]) -> str:
        return ""

    def finish(self, host: Host, run: PaperRun, rank: int, number: int) -> None:
        """The optimizer, and whatever frames a step."""
        end = run.end
        host.launch("multi_tensor_apply_kernel", end + 10, end + 100, end + 120, MAIN_THREAD)


class Marks(Style):
    """pptrace's own."""

    framework = "pptrace"
    schedules = ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "looped-bfs", "interleaved-zb")
    schedules += ("zbv", "v-half", "v-min", "dualpipe-v", "interleaved-afab")
    messages_named = True

    def __init__(self) -> None:
        self._number = 0

    def op_name(self, plan: Plan, rank: int, action: Action) -> str:
        return format_mark(OpMark(action, self._number))

    def messages_name(self, plan: Plan, rank: int, actions: Sequence[Action]) -> str:
        transfers = tuple(Transfer(action, peer_of(plan, action), 64) for action in actions)
        return format_mark(P2PMark(transfers, Axis.PP, self._number))

    def step(self, run: PaperRun, rank: int, number: int, at: int) -> list[Event]:
        self._number = number
        return super().step(run, rank, number, at)


class OneByOne(Style):
    """Each message of a group has its range and its kernel."""

    def messages(self, host: Host, plan: Plan, rank: int, group: Sequence[Done]) -> None:
        for index, done in enumerate(group):
            begin = done.start - LEAD + 3 * index
            if name := self.messages_name(plan, rank, [done.action]):
                host.range(name, begin, begin + 3)
            kernel = (done.start, done.end)
            host.launch("ncclDevKernel_SendRecv", begin + 1, *kernel, MAIN_THREAD, NCCL_STREAM + index)


class TorchLabels(OneByOne):
    """torch.distributed.pipelining: ``PP:{action}``; emit_nvtx adds to the names."""

    framework = "torch.distributed.pipelining"
    schedules = ("interleaved-1f1b", "looped-bfs", "interleaved-zb", "zbv", "dualpipe-v")
    messages_named = True

    def op_name(self, plan: Plan, rank: int, action: Action) -> str:
        return f"PP:{action}, seq = 4, op_id = 7, sizes = [[2, 3]]"

    def messages_name(self, plan: Plan, rank: int, actions: Sequence[Action]) -> str:
        return f"PP:{actions[0]}"


class TorchGpipe(Style):
    """ScheduleGPipe: a range holds the op's messages as well, of which nothing tells."""

    framework = "torch.distributed.pipelining"
    schedules = ("gpipe",)

    def step(self, run: PaperRun, rank: int, number: int, at: int) -> list[Event]:
        host = Host(at, 1 + (rank * 100 + number) * 10_000)
        groups = groups_of(run.ranks[rank])
        for index, group in enumerate(groups):
            done = group[0]
            if done.action.kind.is_p2p:
                self.messages(host, run.plan, rank, group)
                continue
            before = groups[index - 1][0] if index else None
            waits = before is not None and before.action.kind.is_recv
            begin = (before.start if waits and before else done.start) - LEAD
            host.range(
                f"{'Forward' if done.action.kind is Kind.F else 'Backward'} {done.action.microbatch}",
                begin,
                done.start - 30,
            )
            self.launch_op(host, done)
        self.finish(host, run, rank, number)
        return host.events


class TorchOneFOneB(OneByOne):
    """Schedule1F1B, or any runtime without labels, profiled with its operators."""

    has_operators = True
    schedules = ("1f1b", "gpipe")

    def launch_op(self, host: Host, done: Done) -> None:
        forward = done.action.kind is Kind.F
        thread = CPU_THREADS.get(done.action.kind, AUTOGRAD_THREAD)
        for index in range(5):
            begin = done.start - LEAD + 2 + 2 * index
            name = "aten::mm" if forward else "autograd::engine::evaluate_function: MmBackward0"
            host.operator(name, begin, begin + 2, thread)
        super().launch_op(host, done)

    def messages(self, host: Host, plan: Plan, rank: int, group: Sequence[Done]) -> None:
        for index, done in enumerate(group):
            begin = done.start - LEAD + 3 * index
            host.operator("c10d::send" if done.action.kind.is_send else "c10d::recv_", begin, begin + 3)
        super().messages(host, plan, rank, group)

    def finish(self, host: Host, run: PaperRun, rank: int, number: int) -> None:
        host.range("Optimizer.step#AdamW.step", run.end + 5, run.end + 30)
        super().finish(host, run, rank, number)


class TorchBatched(TorchOneFOneB):
    """The same on NCCL with ``batch_isend_irecv``: the operators return before the end of the batch launches its one kernel."""

    def messages(self, host: Host, plan: Plan, rank: int, group: Sequence[Done]) -> None:
        for index, done in enumerate(group):
            begin = group[0].start - LEAD + 2 * index
            host.operator("c10d::send" if done.action.kind.is_send else "c10d::recv_", begin, begin + 2)
        Style.messages(self, host, plan, rank, group)


class MegatronNvtx(Style):
    """Megatron-LM with --nvtx-ranges: phases of the interleaved schedule, and functions of messages."""

    framework = "megatron-lm"
    schedules = ("1f1b", "interleaved-1f1b")
    PACKAGE = "megatron.core.pipeline_parallel"
    WORDS: ClassVar[dict[Kind, tuple[str, str]]] = {
        Kind.SEND_F: ("send", "forward"),
        Kind.SEND_B: ("send", "backward"),
        Kind.RECV_F: ("recv", "forward"),
        Kind.RECV_B: ("recv", "backward"),
    }

    def messages_name(self, plan: Plan, rank: int, actions: Sequence[Action]) -> str:
        words: dict[str, list[str]] = {"send": [], "recv": []}
        for action in actions:
            way, direction = self.WORDS[action.kind]
            words[way].append(direction)
        words_of_name = [
            word for way, directions in words.items() for word in ([way, *directions] if directions else [])
        ]
        return f"{self.PACKAGE}.p2p_communication.{'_'.join(words_of_name)}"

    def messages(self, host: Host, plan: Plan, rank: int, group: Sequence[Done]) -> None:
        """The functions post at most one message of each way and direction."""
        rest = list(group)
        while rest:
            now = {done.action.kind: done for done in reversed(rest)}
            batch = sorted(now.values(), key=lambda done: (done.action.kind.is_recv, done.action.kind.value[-1] == "B"))
            rest = [done for done in rest if done not in batch]
            shift = 10 * (len(group) - len(rest) - len(batch))
            begin = group[0].start - LEAD + shift
            host.range(self.messages_name(plan, rank, [done.action for done in batch]), begin, begin + 8)
            end = max(done.end for done in batch)
            host.launch("ncclDevKernel_SendRecv", begin + 5, group[0].start, end, MAIN_THREAD, NCCL_STREAM + shift)

    def finish(self, host: Host, run: PaperRun, rank: int, number: int) -> None:
        if run.plan.num_chunks > 1:
            name = f"{self.PACKAGE}.schedules.forward_backward_pipelining_with_interleaving.steady"
            host.range(name, run.end // 4, run.end // 2)
        super().finish(host, run, rank, number)


class ZeroBubble(Style):
    """sail-sg zero-bubble with --profile: ids on everything, fused messages, one flush of the last weight gradients."""

    framework = "zero-bubble"
    schedules = ("1f1b", "zb-h1", "zb-h2", "zb-auto", "interleaved-1f1b", "interleaved-zb", "zbv", "v-half", "v-min")
    messages_named = True
    LETTERS: ClassVar[dict[Kind, str]] = {Kind.F: "F", Kind.B: "B", Kind.I: "B", Kind.W: "W"}
    WORDS: ClassVar[dict[Kind, str]] = {
        Kind.SEND_F: "SEND_FORWARD",
        Kind.RECV_F: "RECV_FORWARD",
        Kind.SEND_B: "SEND_BACKWARD",
        Kind.RECV_B: "RECV_BACKWARD",
    }

    def step(self, run: PaperRun, rank: int, number: int, at: int) -> list[Event]:
        host = Host(at, 1 + (rank * 100 + number) * 10_000)
        groups = groups_of(run.ranks[rank])
        last = max(index for index, group in enumerate(groups) if group[0].action.kind is not Kind.W)
        for group in groups[: last + 1]:
            if group[0].action.kind.is_p2p:
                self.messages(host, run.plan, rank, group)
            else:
                self.op(host, run.plan, rank, group[0])
        self._flush(host, [group[0] for group in groups[last + 1 :]])
        self.finish(host, run, rank, number)
        return host.events

    def _flush(self, host: Host, weights: Sequence[Done]) -> None:
        for chunk in dict.fromkeys(done.action.chunk for done in weights):
            of_chunk = [done for done in weights if done.action.chunk == chunk]
            contiguous = of_chunk[-1].end - of_chunk[0].start == sum(done.end - done.start for done in of_chunk)
            if contiguous:
                host.range(f"W_clear.{chunk}.0", of_chunk[0].start - LEAD, of_chunk[-1].start - LEAD + 20)
            for done in of_chunk:
                if not contiguous:
                    host.range(f"W{done.action.microbatch}.{chunk}.0", done.start - LEAD, done.start - LEAD + 20)
                self.launch_op(host, done)

    def op_name(self, plan: Plan, rank: int, action: Action) -> str:
        return f"{self.LETTERS[action.kind]}{action.microbatch}.{action.chunk}.0"

    def op(self, host: Host, plan: Plan, rank: int, done: Done) -> None:
        super().op(host, plan, rank, done)
        if done.action.kind in (Kind.F, Kind.B, Kind.I):  # the functions around have ranges of their own
            host.range(self.LETTERS[done.action.kind], done.start - LEAD, done.start - LEAD + 19)

    def messages_name(self, plan: Plan, rank: int, actions: Sequence[Action]) -> str:
        return "_".join(f"{self.WORDS[a.kind]}.{a.microbatch}.{a.chunk}.0" for a in actions)

    def finish(self, host: Host, run: PaperRun, rank: int, number: int) -> None:
        host.range(f"iter_{rank}_{number}", run.end // 8 - LEAD, run.end + 3)  # the first forwards lie before it
        host.range("Optimizer", run.end + 5, run.end + 40)
        super().finish(host, run, rank, number)


class DeepSpeed(OneByOne):
    """PipelineEngine: forwards labelled everywhere, backwards on the last stage alone; nothing has ids."""

    framework = "deepspeed"
    schedules = ("1f1b",)

    def op_name(self, plan: Plan, rank: int, action: Action) -> str:
        if action.kind is Kind.F:
            return "DeepSpeedEngine.forward"
        return "DeepSpeedEngine.backward" if rank == plan.pp - 1 else ""


class Nanotron(OneByOne):
    """Steps alone."""

    framework = "nanotron"
    schedules = ("1f1b", "gpipe")

    def finish(self, host: Host, run: PaperRun, rank: int, number: int) -> None:
        host.range("train_batch_iter", -LEAD - 5, run.end + 200)
        super().finish(host, run, rank, number)


class Timers(OneByOne):
    """Megatron's or veScale's timers as ranges."""

    framework = "megatron-lm"
    schedules = ("1f1b", "gpipe", "eager-1f1b", "interleaved-1f1b")
    WORDS: ClassVar[dict[Kind, str]] = {
        Kind.SEND_F: "forward-send",
        Kind.RECV_F: "forward-recv",
        Kind.SEND_B: "backward-send",
        Kind.RECV_B: "backward-recv",
    }

    def op_name(self, plan: Plan, rank: int, action: Action) -> str:
        return "forward-compute" if action.kind is Kind.F else "backward-compute"

    def messages_name(self, plan: Plan, rank: int, actions: Sequence[Action]) -> str:
        return self.WORDS[actions[0].kind]

    def finish(self, host: Host, run: PaperRun, rank: int, number: int) -> None:
        host.range("optimizer", run.end + 5, run.end + 30)
        super().finish(host, run, rank, number)


class PithTrain(Style):
    """DualPipeV of pith-train; weight gradients name nothing."""

    framework = "pith-train"
    schedules = ("dualpipe-v",)

    def op_name(self, plan: Plan, rank: int, action: Action) -> str:
        words = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward"}
        if action.kind is Kind.W:
            return "weight chunk"
        return " ".join(f"{words[half.kind]} chunk {half.microbatch} (phase{half.chunk})" for half in action.halves)


class Unlabelled(Style):
    """picotron, ColossalAI and others: threads, kernels and messages alone."""

    schedules = ("1f1b", "gpipe", "eager-1f1b", "interleaved-1f1b")


STYLES: tuple[type[Style], ...] = (
    *(Marks, TorchLabels, TorchGpipe, TorchOneFOneB, TorchBatched, MegatronNvtx, ZeroBubble, DeepSpeed),
    *(Nanotron, Timers, PithTrain, Unlabelled),
)
