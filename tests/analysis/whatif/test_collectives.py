"""Collectives over other links: an op is its compute and its all-reduces, and 1F1B takes m + p − 1 pairs of ops."""

from __future__ import annotations

from pathlib import Path

import pytest

import pptrace
from pptrace.errors import PptraceError, UsageError
from tests.support.tp_tables import COMPUTE_NS, transfer_ns, write_run

PP, MICROBATCHES = 2, 4
MOVED = 3_000_000
GBPS = 1.0


def span(moved_ns: float) -> float:
    """(m + p − 1) (F + B), where B is two F."""
    return (MICROBATCHES + PP - 1) * 3 * (COMPUTE_NS + moved_ns)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pptrace.Run:
    path = tmp_path_factory.mktemp("tp") / "run.csv"
    assert write_run(path, lambda _: MOVED, 0, GBPS) == span(MOVED)
    return pptrace.load(path)


@pytest.mark.parametrize("speed", [0.1, 0.5, 1.0, 4.0, 1000.0])
def test_what_ops_wait_for_transfers_takes_so_many_times_less(run: pptrace.Run, speed: float) -> None:
    (scenario,) = run.whatif(collective_speeds=f"tp={speed:g}").result.scenarios
    assert scenario.span_ns == pytest.approx(span(MOVED / speed), abs=5)
    assert (
        scenario.low_ns <= min(scenario.span_ns, span(MOVED)) <= max(scenario.span_ns, span(MOVED)) <= scenario.high_ns
    )
    assert (scenario.collective_speeds, str(scenario.standing)) == ({"tp": speed}, "ideal")


def test_links_of_another_axis_change_what_its_transfers_take_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    write_run(path, lambda _: MOVED, 0, GBPS)
    path.write_text(path.read_text().replace(",tp,", ",cp,"))
    run = pptrace.load(path)
    (scenario,) = run.whatif(collective_speeds="cp=0.5").result.scenarios
    assert scenario.span_ns == pytest.approx(span(2 * MOVED), abs=5)
    with pytest.raises(PptraceError, match="no op of this run waits for collectives along tp"):
        run.whatif(collective_speeds="tp=2")


def test_a_fitted_latency_stays(tmp_path: Path) -> None:
    latency, sizes = 1_000_000, (1_000_000, 4_000_000)
    write_run(tmp_path / "run.csv", lambda microbatch: sizes[microbatch % 2], latency, GBPS)
    (scenario,) = pptrace.load(tmp_path / "run.csv").whatif(collective_speeds="tp=0.5").result.scenarios
    slow = write_run(tmp_path / "slow.csv", lambda microbatch: sizes[microbatch % 2], latency, GBPS / 2)
    # Latency is known as a part of all transfers of the axis: of small ones it is more, of large ones less.
    assert scenario.span_ns == pytest.approx(slow, rel=0.02)
    share = latency / (sum(transfer_ns(size, latency, GBPS) for size in sizes) / 2)
    assert f"{share:.0%} of what collectives along tp take is the latency" in scenario.note
    assert "no latency could be fitted" not in scenario.note


@pytest.mark.parametrize("given", ["dp=2", "tp", "tp=0", "tp=x", "tp=-1", "tp=inf", "pp=2", "=2"])
def test_what_is_no_axis_of_ops_and_no_speed_is_refused(run: pptrace.Run, given: str) -> None:
    with pytest.raises(PptraceError, match=r"--collective-speed .*: expected one of tp, cp, ep"):
        run.whatif(collective_speeds=given)


def test_an_axis_is_given_once(run: pptrace.Run) -> None:
    with pytest.raises(UsageError, match=r"an axis twice in tp=0\.1, tp=2; expected each once"):
        run.whatif(collective_speeds=("tp=0.1", "tp=2"))


def test_an_axis_that_no_op_waits_for_is_refused(run: pptrace.Run) -> None:
    with pytest.raises(PptraceError, match="no op of this run waits for collectives along cp"):
        run.whatif(collective_speeds="cp=2")


def test_links_that_cost_tp_43_percent_of_its_throughput_can_be_asked_for(run: pptrace.Run) -> None:
    """Tensor parallelism across nodes loses 43 % of its throughput, as one of the documents has it."""
    slower = (1 / 0.57 - 0.7) / 0.3  # 7 ms of 10 are compute
    (scenario,) = run.whatif(collective_speeds=f"tp={1 / slower!r}").result.scenarios
    assert span(MOVED) / scenario.span_ns == pytest.approx(1 - 0.43, abs=1e-6)
