"""Plan and costs in, timeline out."""

from pptrace.simulate.costs import IDEAL, Costs, uniform
from pptrace.simulate.simulation import SimulatedRank, Simulation, peak_inflight, simulate

__all__ = ["IDEAL", "Costs", "SimulatedRank", "Simulation", "peak_inflight", "simulate", "uniform"]
