"""Ranges that torch writes for every program (torch 2.x, ``torch/profiler/profiler.py``, ``torch/optim/optimizer.py``)."""

from __future__ import annotations

from pptrace.recognise.labels.label import Label, fixed, rule

RULES = (
    rule(r"ProfilerStep#(?P<step>\d{1,9})", lambda m: Label("", span="STEP", step=int(m["step"]))),
    fixed(r"Optimizer\.step#\w+\.step", Label("", span="OPTIMIZER")),
)
