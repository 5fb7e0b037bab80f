"""Plan and costs in, timeline out."""

from pptrace.simulator.costs import IDEAL, Costs, uniform
from pptrace.simulator.simulation import SimulatedRank, Simulation, peak_inflight, simulate

__all__ = ["IDEAL", "Costs", "SimulatedRank", "Simulation", "peak_inflight", "simulate", "uniform"]
