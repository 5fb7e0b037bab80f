"""The session of a rank that ``pptrace run`` started."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from multiprocessing.process import BaseProcess

from instrument.adapters.calls import CallObserver
from instrument.adapters.install import Adapters
from instrument.expert_counts import EXPERTS_KEY
from instrument.launch.facts import (
    TRACE_SCHEMA,
    UNKNOWN_SIZE,
    plan_as_json,
    read_backend,
    read_device,
    read_device_id,
    read_network_ports,
    read_rank,
    read_versions,
    sample_clock,
)
from instrument.launch.options import RunOptions
from instrument.launch.record import AgreedStart, MadeOptimizers, RecordWriter, StepCounter
from instrument.launch.recording.chosen_ranks import RankChoice
from instrument.launch.recording.core_wait import CoreWait
from instrument.launch.recording.live import LiveRecorder
from instrument.launch.recording.optimizer_steps import MessageWatch, OptimizerSteps
from instrument.launch.recording.out_of_memory import find_out_of_memory, write_snapshot
from instrument.launch.recording.profiler import Profiler, TraceProfiler
from instrument.launch.recording.script_profilers import ScriptProfilers, ScriptTrace
from instrument.launch.recording.shortfall import (
    THEIRS,
    describe_activity,
    ended_early,
    in_window,
    no_step,
    script_recorded,
    steps_text,
)
from instrument.launch.recording.step_memory import StepMemory, keep_maxrss
from instrument.launch.recording.step_times import StepTimes
from instrument.launch.recording.user_marks import UserMarks
from instrument.launch.started_processes import StartedProcesses
from instrument.recorder import Recorder
from instrument.session import Predict, Session
from pptrace import marking
from pptrace.environment import read_environment
from pptrace.schedule.plan import Plan


class TracedSession(Session):
    """Profiles the steps that ``options`` ask for and says to the launcher how far the script is.

    ``hold`` keeps signals from interrupting the writing of a trace. ``logs`` keep the communication under hooks. ``choice``:
    whether this rank is recorded is chosen when the window begins. Of a process that the script started ``world_size`` is
    not known until torch.distributed knows it.
    """

    def __init__(
        self,
        options: RunOptions,
        world_size: int,
        profiler: Profiler | None,
        writer: RecordWriter,
        counter: StepCounter,
        hold: Callable[[], AbstractContextManager[None]],
        logs: Sequence[CallObserver],
        agreed: AgreedStart,
        made: MadeOptimizers,
        choice: RankChoice | None,
    ) -> None:
        self._world_size = world_size
        self._live_started = sample_clock()
        self._live: LiveRecorder | None = None
        if options.live:
            rank = writer.record.rank
            self._live = LiveRecorder(writer.run_dir, rank, self._live_facts, lambda: writer.record.facts)
        rows = None if self._live is None else self._live.rows
        super().__init__(Recorder(lambda: profiler is not None and profiler.takes_annotations, rows))
        self._window = window = options.window
        self._profiler = profiler
        self._choice = choice
        self._writer = writer
        self._counter = counter
        self._hold = hold
        self._expected = 0
        self._started: dict[str, int] | None = None
        self._core_wait: CoreWait | None = None
        self._recorded = range(window.first, window.first)
        """The steps that are recorded, or are to be: those of the window, or later ones."""
        self._script_profilers: ScriptProfilers | None = None
        self._script_trace: ScriptTrace | None = None
        self._processes = StartedProcesses()
        self._predict: Predict | None = None
        self._memory = StepMemory()
        self._step_times = StepTimes(lambda: self._records_now)
        self._saving = threading.Lock()
        self._with_hooks = options.hooks
        self._logs = logs
        self._agreed = agreed if world_size > 1 and not window.whole_run else None
        """Agreement of the ranks on a step, for torch's profiler, which alone records twice; None where every step is
        recorded.
        """
        self._agreed_step: int | None = None
        """The step that was agreed on last, from which on this rank has recorded."""
        self._made = made
        self._are_updated: bool | None = None
        """True if all ranks of the pipeline have an optimizer; None until its first pass has ended."""
        self._hooks: OptimizerSteps | None = None
        self._adapters: Adapters | None = None
        self._marks_steps = False
        self._teardown: int | None = None
        """The number of the range that holds no step but the end of the script."""
        self._passes = 0  # of the step that runs now

    def record_started(self, record: Callable[[BaseProcess, int], bool]) -> None:
        """Offer the processes that the script starts from now on to ``record``, unless this one has run steps itself."""

        def offered(process: BaseProcess, index: int) -> bool:
            if self.num_steps or not record(process, index):
                return False
            if self._profiler is not None and self._profiler.recording:  # of the whole run: it is theirs
                with self._hold(), self._saving:
                    self._profiler.discard()
                self._profiler = None
            return True

        self._processes.record = offered

    def stop_started(self) -> None:
        """End the recorded processes that the script started, and wait until they have."""
        self._processes.stop()

    def open(self) -> None:
        """Begin to observe: before the script's first line."""
        self._writer.add_facts(versions=read_versions(), environment=read_environment(os.environ))
        keep_maxrss(self._memory.process)
        if self._with_hooks:
            self._hooks = OptimizerSteps(self)
            self._adapters = Adapters(self, [MessageWatch(self._hooks.look)], self._logs)
            self._collections.watch()
        if isinstance(self._profiler, TraceProfiler):
            folder, rank = self._profiler.path.parent / "script_profiler", self._writer.record.rank
            kept = self._script_trace = ScriptTrace(folder, rank, lambda step: step in self._window)
            self._script_profilers = ScriptProfilers(
                self._yield_to_script, lambda path, span: kept.keep(path, self._step_times.steps_within(*span))
            )
        marking.register(UserMarks(self).open)
        self._processes.watch()
        os.register_at_fork(after_in_child=self._leave_child)
        if self._profiler is not None and self._window.whole_run:
            self._start(self._profiler)

    def describe(
        self,
        mesh: Mapping[str, int | str],
        plan: Plan,
        pp_ranks: Sequence[int],
        model: Mapping[str, object] | None = None,
        predict: Predict | None = None,
    ) -> None:
        self._predict = predict
        self._writer.add_facts(
            framework="pptrace",
            mesh=dict(mesh),
            plan=plan_as_json(plan),
            pp_ranks=list(pp_ranks),
            model=dict(model or {}),
        )

    def describe_watched(
        self, framework: str, plan: Plan | None, pp_ranks: Sequence[int], mesh: Mapping[str, int | str] | None = None
    ) -> None:
        self._writer.add_facts(framework=framework)
        if mesh is not None:
            self._writer.add_facts(mesh=dict(mesh), pp_ranks=list(pp_ranks))
        if plan is not None:
            self._writer.add_facts(plan=plan_as_json(plan), pp_ranks=list(pp_ranks))

    def begin_optimizer(self, optimizer: object) -> None:
        if self._hooks is not None:
            self._hooks.begin_whole(optimizer)

    def end_optimizer(self, optimizer: object, *, stepped: bool) -> None:
        if self._hooks is not None:
            self._hooks.end_whole(optimizer, stepped=stepped)

    def begin_pass(self) -> int:
        if self._hooks is not None:
            self._hooks.ignore_backward()
            self._hooks.begin()
            if self._are_updated is None and self._passes:
                self._are_updated = self._made.on_all(
                    self._writer.record.facts.get("pp_ranks") or range(self._world_size)
                )
            elif self._are_updated is None:
                self._made.note(has_one=self._hooks.has_optimizers)
            if self._hooks.ends_before_pass(self._passes, have_optimizers=bool(self._are_updated)):
                self.end_step()
                self.begin_step()
        self._passes += 1
        return self._passes - 1

    def look(self) -> None:
        if self._hooks is not None:
            self._hooks.look()

    def take_step_marks(self) -> None:
        """The script says itself where its steps begin and end: what the hooks believed so far is forgotten."""
        if self._marks_steps:
            return
        self._marks_steps = True
        self._close_step_range()
        if self._hooks is not None:
            self._hooks.detach()
            self._hooks = None

    def expect_steps(self, n: int) -> None:
        self.take_step_marks()
        self._expected = self.num_steps + n
        if not self._records_now and self.num_steps == 0:
            self._window = self._window.within(n)
            self._recorded = range(self._window.first, self._window.first)
        self._counter.write(self.num_steps, self._expected)

    def begin_step(self) -> None:
        if self._choice is not None and isinstance(self._profiler, TraceProfiler) and not self._is_script_profiling:
            self._choose(self._choice, self._profiler)
        profiler = self._profiler
        if profiler is not None and not self._is_script_profiling and not self._record_as_agreed(profiler):
            self._record_as_configured(profiler)
        self._passes = 0
        self._memory.begin(self.num_steps, is_recorded=self._profiler is not None and self._profiler.recording)
        if self._live is not None:
            self._live.begin_step(self.num_steps)
        self._step_times.begin()
        super().begin_step()

    @property
    def _records_now(self) -> bool:
        return self._is_script_profiling or (self._profiler is not None and self._profiler.recording)

    def _prepare(self, profiler: Profiler) -> None:
        """Prepare the profiler, which may slow the step that begins now."""
        self._step_times.disturb(self.num_steps)
        profiler.prepare()

    def _choose(self, choice: RankChoice, profiler: TraceProfiler) -> None:
        """Record a step on trial, choose by it, or learn what was chosen, as the window comes nearer."""
        first, mesh = self._window.first, self._writer.record.facts.get("mesh")
        num_steps = (self._window.stop or first) - first
        if choice.is_first and self.num_steps == first - 2:
            self._prepare(profiler)
            profiler.start()
        elif choice.is_first and self.num_steps == first - 1 and profiler.recording:
            choice.make(mesh, num_steps, profiler.count())
        elif self.num_steps >= first:
            self._choice = None
            chosen = (
                choice.make(mesh, num_steps, None) if choice.is_first and first < 2 else choice.read(mesh, num_steps)
            )
            self._writer.add_facts(profile_ranks=chosen.as_json())
            if self._writer.record.rank not in chosen.ranks:
                profiler.release()
                self._profiler = None

    def _record_as_configured(self, profiler: Profiler) -> None:
        if self._started is not None:
            return
        if self.num_steps > self._window.first and self._agreed is not None and self._script_profilers is not None:
            self._agreed.name(self.num_steps + 1)  # a profiler of the script ran until now, perhaps on this rank alone
            self._prepare(profiler)
        elif self.num_steps >= self._window.first:
            self._start(profiler)
        elif self.num_steps == self._window.first - 1:
            self._prepare(profiler)

    def _record_as_agreed(self, profiler: Profiler) -> bool:
        """Record from the step that a rank named which was late; whether one did."""
        step = self._agreed.read() if self._agreed is not None and self._script_profilers is not None else None
        if step is None or step == self._agreed_step:
            return step is not None
        if self.num_steps >= step:
            if profiler.recording:
                with self._hold(), self._saving:
                    profiler.discard()
            self._agreed_step = step
            self._start(profiler)
        elif not profiler.recording:
            self._prepare(profiler)
        return True

    def end_step(self) -> None:
        self._step_times.end()
        super().end_step()
        if self._live is not None:
            self._live.end_step(self.num_steps - 1, profiled=self._profiler is not None and self._profiler.recording)
        self._memory.end(keep=self._profiler is not None and self._profiler.recording)
        self._counter.write(self.num_steps, self._expected)
        if self.num_steps not in self._recorded and not self._window.whole_run and self._started is not None:
            self.save()

    def restart_step(self) -> None:
        """Begin the step anew; what was recorded of it is dropped where it is the first, else a step of its own in the trace."""
        profiler = self._profiler
        if profiler is None or self._started is None or not profiler.recording:
            super().restart_step()
        elif self._window.whole_run or self.num_steps > self._recorded.start:
            self.end_step()
            self.begin_step()
        else:
            self._close_step_range()
            with self._hold(), self._saving:
                profiler.discard()
            self._started = None
            self.begin_step()

    @property
    def _is_script_profiling(self) -> bool:
        return self._script_profilers is not None and self._script_profilers.running

    def _yield_to_script(self) -> None:
        """A profiler of the script begins: what was recorded so far is kept if it holds a step, else later steps are taken."""
        profiler = self._profiler
        if profiler is None:
            return
        if not profiler.recording:
            with self._hold(), self._saving, suppress(RuntimeError):
                profiler.release()
        elif self.num_steps > self._recorded.start or self._window.whole_run:
            self._close_step_range()
            self.save()
            if not self._window.whole_run and self.num_steps < self._recorded.stop:
                steps = f"{self._recorded.start}:{self.num_steps}"
                self._writer.update(note=f"recorded steps {steps} of --steps {self._window}: {THEIRS} began then")
            elif self._window.whole_run:
                self._writer.update(note=f"recorded until {THEIRS} began (in step {self.num_steps}), which comes first")
        else:
            with self._hold(), self._saving, suppress(RuntimeError):
                profiler.discard()
            self._started = None

    def _leave_child(self) -> None:
        """A forked child is no rank of the run: it records nothing and writes no file of this one."""
        self._profiler = None
        if self._live is not None:
            self._live.leave_child()
        self._collections.remove()
        marking.register(None)
        if self._hooks is not None:
            self._hooks.detach()

    def note_error(self, error: BaseException) -> None:
        """The script has raised; what is lost with another rank is a ``RuntimeError``."""
        if isinstance(error, RuntimeError) and self._adapters is not None and self._adapters.calls is not None:
            self._adapters.calls.fail()
        if (out_of_memory := find_out_of_memory(error)) is not None:
            self._write_snapshot(out_of_memory)

    def _write_snapshot(self, error: BaseException) -> None:
        """Keep what was alive when memory ran out; whatever goes wrong here hides nothing of the script's error."""
        self._note_memory(running=True)
        rank = self._writer.record.rank
        try:
            path, line = write_snapshot(self._writer.run_dir, rank, error, self._memory.now())
        except (OSError, MemoryError, RuntimeError) as err:
            print(f"pptrace: out of memory, and no snapshot could be written: {err}", file=sys.stderr, flush=True)
            return
        self._writer.add_facts(out_of_memory=path.name)
        print(f"pptrace: {line}", file=sys.stderr, flush=True)

    def close(self, *, clean: bool) -> None:
        """The script has ended, cleanly or not. What was recorded is kept, unless it holds no step of a clean run."""
        profiler = self._profiler
        if self._adapters is not None and self._adapters.calls is not None:
            self._adapters.calls.look()
        if clean and (profiler is None or profiler.recording):
            self.look()
        is_whole = clean and self._hooks is not None and bool(self._passes or self._hooks.is_step_open)
        if is_whole:  # nothing after it announced its end
            self.end_step()
        if profiler is not None and profiler.recording:
            if clean and not self._window.whole_run and self.num_steps <= self._recorded.start:
                profiler.discard()
            else:
                if clean and self._hooks is not None and not is_whole:
                    self._teardown = self.num_steps  # what came after the last step: the end of the script
                self._close_step_range()
                self.save()
        if self._live is not None:
            self._live.close()
        kept = self._keep_script_trace()
        self._note_memory(running=not clean)
        self._note_step_times()
        self._writer.update(
            steps_seen=self.num_steps, note=self._writer.record.note or self._shortfall(), script_trace=kept
        )

    def _note_step_times(self) -> None:
        if (times := self._step_times.facts(self._recorded)) is not None:
            self._writer.add_facts(step_times=times)

    def _note_memory(self, *, running: bool) -> None:
        if (memory := self._memory.summary(running=running)) is not None:
            self._writer.add_facts(memory=memory)

    def _keep_script_trace(self) -> str | None:
        """The trace of the script's own profiler, in place of one of pptrace's."""
        kept = self._script_trace
        if kept is not None and self._writer.record.trace is not None:
            kept.drop()
        return None if kept is None or kept.path is None else str(kept.path)

    def save(self, *, blocked: bool = False) -> None:
        """Stop recording and write the trace; nothing where none is being recorded. Usable from any thread."""
        profiler = self._profiler
        with self._hold(), self._saving:
            if blocked:
                self._note_memory(running=True)
            if profiler is None or not profiler.recording:
                return
            try:
                profiler.stop(self._metadata(sample_clock(), blocked), blocked=blocked)
            except (OSError, RuntimeError) as err:
                self._writer.update(note=f"the trace could not be written: {err}")
                return
            self._step_times.disturb(self.num_steps)
            self._writer.update(steps_seen=self.num_steps, trace=profiler.path.name)

    def _learn_rank(self) -> None:
        """Ask torch.distributed who this is, where no launcher has told."""
        if self._world_size != UNKNOWN_SIZE or (known := read_rank()) is None:
            return
        rank, self._world_size = known
        self._writer.update(rank=rank)
        if isinstance(self._profiler, TraceProfiler):
            self._profiler.path = self._profiler.path.with_name(f"rank{rank}.json.gz")

    def _start(self, profiler: Profiler) -> None:
        self._learn_rank()
        with self._hold():
            self._started, self._core_wait = sample_clock(), CoreWait.now()
            try:
                profiler.start()
            except RuntimeError as err:
                self._profiler = None
                self._writer.update(note=f"torch's profiler could not be started, nothing is recorded: {err}")
                return
        if self._window.stop is not None:
            length = self._window.stop - self._window.first
            self._recorded = range(self.num_steps, self.num_steps + length)

    @property
    def _coordinates(self) -> dict[str, object]:
        record = self._writer.record
        names = {"rank": record.rank, "local_rank": record.local_rank, "world_size": self._world_size}
        return {**names, "host": record.host}

    def _live_facts(self) -> dict[str, object]:
        """Facts of this rank that readers of live records need."""
        self._learn_rank()
        facts = self._writer.record.facts
        learnt = {} if self._adapters is None else self._adapters.facts()
        return {
            **self._coordinates,
            **{name: facts[name] for name in ("framework", "mesh", "pp_ranks", "plan", "model") if facts.get(name)},
            **{name: learnt[name] for name in ("hooks", "groups") if learnt.get(name)},
            "backend": read_backend(),
            "device": read_device(),
            "clock": {"start": self._live_started},
        }

    def _metadata(self, stopped: dict[str, int], blocked: bool) -> dict[str, object]:
        self._learn_rank()
        backend, device = read_backend(), read_device()
        clock = {"start": self._started or stopped, "stop": stopped}
        stop = self.num_steps if self._window.stop is None else min(self.num_steps, self._recorded.stop)
        self._writer.add_facts(backend=backend, device=device, clock=clock, environment=read_environment(os.environ))
        if self._adapters is not None:
            learnt = self._adapters.facts()
            known = self._writer.record.facts.get("framework")  # a pipeline's runtime says more than data parallelism
            self._writer.add_facts(**learnt, framework=known or self._adapters.framework)
        facts, steps = self._writer.record.facts, range(self._recorded.start, max(stop, self._recorded.start))
        experts = None if blocked else self._recorder.expert_counts.facts()
        predicted, failure = self._predicted(experts, steps)
        watched = {
            name: facts[name] for name in ("framework", "hooks", "groups", "notes", "failed_calls") if facts.get(name)
        }
        if failure:
            watched["notes"] = [*watched.get("notes", ()), failure]
        return {
            "schema": TRACE_SCHEMA,
            **self._coordinates,
            "versions": facts["versions"],
            "environment": facts["environment"],
            "mesh": facts.get("mesh"),
            "pp_ranks": facts.get("pp_ranks"),
            "plan": facts.get("plan"),
            "model": facts.get("model"),
            **predicted,
            "steps": [steps.start, steps.stop],
            "backend": backend,
            "device": device,
            **({"device_id": device_id} if (device_id := read_device_id()) else {}),
            **({"network_ports": ports} if (ports := read_network_ports()) else {}),
            "clock": clock,
            "core_wait": None if self._core_wait is None else self._core_wait.until(CoreWait.now()),
            **({} if (memory := self._memory.facts()) is None else {"memory": memory}),
            **({} if (times := self._step_times.facts(self._recorded)) is None else {"step_times": times}),
            "recording": {"hooks": self._with_hooks, **({} if self._profiler is None else self._profiler.settings)},
            **({} if self._teardown is None else {"teardown": self._teardown}),
            **({} if experts is None else {EXPERTS_KEY: experts}),
            **watched,
        }

    def _predicted(self, experts: Mapping[str, object] | None, steps: range) -> tuple[dict[str, object], str]:
        """Return (the predictions of the script, as a fact; why there are none): an error in them costs no trace."""
        if self._predict is None:
            return {}, ""
        try:
            return {"predicted": self._predict(experts, steps)}, ""
        except Exception as err:
            return {}, f"what the script predicts of its bytes and memory failed: {type(err).__name__}: {err}"

    def _what_ran(self) -> str:
        if not self._with_hooks:
            return "--no-hooks watches no optimizer and no backward pass"
        return (
            "the script marks its steps itself, and ended none"
            if self._hooks is None
            else describe_activity(self._hooks)
        )

    def _shortfall(self) -> str | None:
        """Describe what is missing of the requested steps, and what to do about it; None where nothing is."""
        if self._profiler is None or self._window.whole_run or self._writer.record.state != "running":
            return None
        seen, window = self.num_steps, self._window
        if seen == 0:
            started = self._processes
            are_recorded = started.num_recorded > 0
            return no_step(
                started.count, self._what_ran(), are_recorded=are_recorded, has_torchrun=started.has_torchrun
            )
        if self._writer.record.trace is None:
            if self._is_script_profiling or seen > window.first:
                spans, kept = () if self._script_profilers is None else self._script_profilers.spans, self._script_trace
                steps = sorted({step for span in spans for step in self._step_times.steps_within(*span)})
                written = None if kept is None or kept.path is None else kept.steps
                return script_recorded(str(window), steps, written)
            return f"{steps_text(seen)} seen, --steps {window} begins at step {window.first}; pass --steps {in_window(seen)}"
        recorded = self._recorded
        if window.stop is not None and seen < recorded.stop:
            return ended_early(f"{recorded.start}:{seen}", str(window), seen, later=recorded.start > window.first)
        if recorded.start > window.first:
            return f"recorded steps {recorded.start}:{recorded.stop} instead of --steps {window}: {THEIRS} ran before"
        return None
