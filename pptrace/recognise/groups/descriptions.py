"""Axes by the descriptions of process groups.

Sources: Megatron-LM core 0.16.1 ``parallel_state.py``; torch ``distributed/device_mesh.py`` (``mesh_<dim>``) with the
names of torchtitan, NeMo AutoModel and FSDP; torch ``distributed_c10d.py`` (``<parent>:split:<n>``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from pptrace.axes import MESH_ORDER, SHARING

_WORDS = (
    ("tp-dp", re.compile(r"TENSOR_AND_DATA_PARALLEL_GROUP\w*")),
    ("tp-cp", re.compile(r"TENSOR_AND_CONTEXT_PARALLEL_GROUP")),
    ("tp-pp", re.compile(r"MODEL_PARALLEL_GROUP")),
    ("etp-ep-pp", re.compile(r"EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP(?:_WITH_EGTP)?")),
    ("etp-ep", re.compile(r"EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP")),
    ("etp", re.compile(r"EXPERT_TENSOR_PARALLEL_GROUP")),
    ("ep", re.compile(r"EXPERT_MODEL_PARALLEL_GROUP")),
    ("edp", re.compile(r"(?:INTRA_PARTIAL_|INTER_PARTIAL_)?EXPERT_DATA_PARALLEL_GROUP\w*")),
    ("tp", re.compile(r"TENSOR_MODEL_PARALLEL_GROUP")),
    ("pp", re.compile(r"PIPELINE_MODEL_PARALLEL_GROUP")),
    ("dp-cp", re.compile(r"(?:INTRA_PARTIAL_|INTER_PARTIAL_)?DATA_PARALLEL_GROUP_WITH_CP\w*")),
    ("dp-cp", re.compile(r"HYBRID_DP_CP_GROUP_\d+")),
    ("dp", re.compile(r"DATA_PARALLEL_GROUP")),
    ("dp", re.compile(r"INTER_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP")),
    ("tp-cp-dp-pp", re.compile(r"INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP")),  # all ranks of an instance
    ("cp", re.compile(r"(?:HIERARCHICAL_)?CONTEXT_PARALLEL_GROUP(?:_L\d+)?")),
    ("embd", re.compile(r"(?:POSITION_)?EMBEDDING_GROUP")),
)
_DIMS = {
    "pp": "pp pipe pipeline pipeline_parallel stage",
    "tp": "tp tensor model tensor_parallel sp",
    "cp": "cp context context_parallel seq ulysses ring",
    "dp": "dp data data_parallel ddp fsdp dp_replicate dp_shard replicate replica shard batch hsdp",
    "ep": "ep expert expert_parallel dp_shard_in_ep",
    "dp-cp": "dp_cp dp_shard_cp loss",
    "etp": "etp",
    "edp": "edp efsdp dp_mod_ep dp_shard_mod_ep ep_shard ep_replicate",
    "world": "world",
}
_AXES = tuple(map(str, (*MESH_ORDER, *SHARING)))
_AXIS_OF_DIM = {axis: axis for axis in _AXES} | {dim: axis for axis, dims in _DIMS.items() for dim in dims.split()}
_BARE = frozenset(
    {
        *_AXES,
        *("etp", "fsdp", "ddp", "hsdp", "dp_replicate", "dp_shard", "dp_cp"),
        *("tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel", "expert_parallel"),
    }
)


@lru_cache(maxsize=4096)
def axis_of_description(description: str) -> str:
    """The axis that a group's description names; "" for the default group, none and strangers."""
    text = description.split(":split:", maxsplit=1)[0].removesuffix("_GLOO")
    text = re.sub(r"_GLOO(?=_L\d+$)", "", text)
    if match := re.fullmatch(r"mesh_(\w+)", text):
        return _AXIS_OF_DIM.get(match[1].lower(), "")
    if text.lower() in _BARE:
        return _AXIS_OF_DIM[text.lower()]
    return next((axis for axis, pattern in _WORDS if pattern.fullmatch(text)), "")


def framework_of_descriptions(descriptions: Iterable[str]) -> tuple[str, str]:
    """(framework, description that identifies it); ("", "") where none is specific to a framework."""
    for description in sorted(descriptions):
        text = description.split(":split:", maxsplit=1)[0].removesuffix("_GLOO")
        if any(pattern.fullmatch(text) for _, pattern in _WORDS):
            return "megatron-lm", description
    return "", ""
