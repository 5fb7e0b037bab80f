"""A cluster without processes: calls are made at once, and what they get and give is pickled as on the way to a worker."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.workflow.remote_rank import RemoteRank, lean_ranks


@dataclass(frozen=True, slots=True)
class Here:
    """A future of :class:`HereEngine`: its result, pickled."""

    result: bytes


@dataclass(frozen=True, slots=True)
class HereEngine:
    """The part of :class:`pptrace.workflow.dask_engine.DaskEngine` that the analysis of recognised ranks needs."""

    num_workers: int = 2

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Here:
        return Here(pickle.dumps(function(*_resolved(pickle.loads(pickle.dumps(arguments))))))

    def results(self, futures: Sequence[Here], names: Sequence[str]) -> list[Any]:
        assert len(futures) == len(names)
        return [pickle.loads(future.result) for future in futures]

    def holders(self, futures: Sequence[Here]) -> list[str]:
        return [f"worker {index % self.num_workers}" for index, _ in enumerate(futures)]

    def remote(self, rank: RecognisedRank) -> RemoteRank:
        """A rank as :meth:`~pptrace.workflow.dask_engine.DaskEngine.read_lean` gives it, with its number."""
        leans = lean_ranks(pickle.loads(pickle.dumps((rank,))))
        assert isinstance(leans, tuple)
        (lean,) = leans
        return RemoteRank(lean.lean, lean.is_plain, ((Here(pickle.dumps((rank,))), 0),))


def _resolved(value: Any) -> Any:
    if isinstance(value, Here):
        return pickle.loads(value.result)
    if isinstance(value, list | tuple):
        return type(value)(map(_resolved, value))
    return {key: _resolved(item) for key, item in value.items()} if type(value) is dict else value
