"""The pool ends what hangs or fails, says where it stood, and leaves no process."""

from __future__ import annotations

import os
from types import FunctionType

import pytest

from tests.instrument.pipeline.cases.training import computed_by, fail_on_rank_one, hang_on_rank_one
from tests.support.pool import Pool, RankFailureError


@pytest.mark.processes
def test_a_case_that_hangs_is_ended_with_the_stacks_of_all_ranks() -> None:
    with Pool(size=2) as pool:
        pool._start(2)
        workers = [process.pid for process in pool._processes]
        with pytest.raises(RankFailureError, match="raise ValueError"):
            pool.run(fail_on_rank_one)
        pool.run(os.getpid)  # so that those started anew are up before the time runs
        with pytest.raises(RankFailureError, match=r"(?s)finished in time.*hang_on_rank_one") as failure:
            pool.run(hang_on_rank_one, timeout_s=1)
        assert "rank 0:" in str(failure.value)
        assert "rank 1:" in str(failure.value)
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_function_of_the_script_itself_is_refused_before_ranks_start() -> None:
    with Pool(size=2) as pool:
        function = FunctionType((lambda: None).__code__, {"__name__": "__main__"}, "of_script")
        with pytest.raises(ValueError, match="of_script is a function of the script itself"):
            pool.run(function)
        assert pool._processes == []


def test_what_one_rank_computes_all_have_and_those_that_join_later(pool: Pool) -> None:
    assert pool.run(computed_by, "once", world=2) == [0, 0]
    assert pool.run(computed_by, "once", world=3) == [0, 0, 0]
    assert pool.run(computed_by, "again", world=3) == [0, 0, 0]
