"""nanotron (``src/nanotron/trainer.py``, ``optim/*.py``): steps, gradient sync and optimizer; nothing per microbatch."""

from __future__ import annotations

from pptrace.recognise.labels.label import Label, fixed

NANOTRON = "nanotron"
RULES = (
    fixed(r"train_batch_iter", Label(NANOTRON, span="STEP")),
    fixed(
        r"(?:FP32GradientAccumulator\.)?sync_gradients_across_dp|sync_tied_weights_gradients",
        Label(NANOTRON, span="GRAD_SYNC"),
    ),
    fixed(r"(?:FP32GradientAccumulator|InheritFromOtherOptimizer)\.step", Label(NANOTRON, span="OPTIMIZER")),
)
