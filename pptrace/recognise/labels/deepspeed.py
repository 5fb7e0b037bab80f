"""DeepSpeed's PipelineEngine (``deepspeed/runtime/engine.py``, ``deepspeed/runtime/pipe/engine.py``).

``DeepSpeedEngine.forward`` is one microbatch on every stage; ``DeepSpeedEngine.backward`` is there on the last stage alone (the
others call autograd without a range). Timers (``wall_clock_breakdown``) have the other names, where ranges are made of them.
No label has ids.
"""

from __future__ import annotations

from pptrace.recognise.labels.label import Label, LabelledAction, fixed
from pptrace.schedule.actions import Kind

DEEPSPEED = "deepspeed"
RULES = (
    fixed(r"DeepSpeedEngine\.forward", Label(DEEPSPEED, (LabelledAction(Kind.F),))),
    fixed(r"DeepSpeedEngine\.backward", Label(DEEPSPEED, (LabelledAction(Kind.B),))),
    fixed(r"pipe_send_output", Label(DEEPSPEED, (LabelledAction(Kind.SEND_F),))),
    fixed(r"pipe_send_grad", Label(DEEPSPEED, (LabelledAction(Kind.SEND_B),))),
    fixed(r"pipe_recv_input", Label(DEEPSPEED, (LabelledAction(Kind.RECV_F),))),
    fixed(r"pipe_recv_grad", Label(DEEPSPEED, (LabelledAction(Kind.RECV_B),))),
    fixed(r"DeepSpeedEngine\.allreduce_gradients", Label(DEEPSPEED, span="GRAD_SYNC")),
    fixed(
        r"DeepSpeedEngine\.(?:step|_take_model_step)|DeepSpeedZeroOptimizer\w*\.step",
        Label(DEEPSPEED, span="OPTIMIZER"),
    ),
    fixed(r"train_batch", Label("", span="STEP")),
)
