"""Kinds of communication by the names of calls and kernels: NCCL, RCCL, gloo, HCCL, DeepEP, MORI, NVSHMEM and others."""

from __future__ import annotations

import re
from functools import lru_cache

from pptrace.marks import P2P

COMMUNICATION_KERNEL = re.compile(
    r"(?-i:(?<![A-Za-z_])(?:nccl|rccl|msccl)[A-Z])|userbuffers|nvshmem|mscclpp|cross_device_reduce|quick_?reduce(?:_|::)"
    r"|symmetric_memory::|hybrid_ep::(?!scan)|elastic::(?:hybrid_)?(?:dispatch|combine)_impl"
    r"|internode(?:_ll)?::(?!get_dispatch_layout|\w+_mask_buffer)|intranode::|hcclAicpu|^Hccl|^Hcom|^hcom_"
    r"|(?<![A-Za-z])Ep(?:Dispatch|Combine)(?:Intra|Inter)Node|moeA2A(?:Dispatch|Combine)Kernel"
    r"|^(?:void )?(?:\w+::)*(?:multimem_\w*|(?:one|two)_?shot_?\w*)(?:all_?reduce|all_?gather|reduce_?scatter)"
    r"|^(?:void )?(?:\w+::)*allreduce_fusion"
    r"|^%?(?:all-reduce|all-gather|reduce-scatter|(?:ragged-)?all-to-all|collective-(?:permute|broadcast)|send|recv)"
    r"(?:-start|-done)?(?:\.\d+)*$",
    re.IGNORECASE,
)
"""Kernels that carry data between devices: NCCL, RCCL and MSCCL (names that go on with a capital letter), MSCCL++, HCCL, NVSHMEM,
DeepEP, MORI, Transformer Engine's user buffers, vLLM, AITER, TensorRT-LLM and FlashInfer, torch's symmetric memory; operations of
XLA, as TPUs record them."""

_KINDS = (
    ("all_reduce", re.compile(r"allreduce|crossdevicereduce|quickreduce")),
    ("all_gather", re.compile(r"allgather")),
    ("reduce_scatter", re.compile(r"reducescatter")),
    ("all_to_all", re.compile(r"all(?:to|2)all")),
    ("broadcast", re.compile(r"broadcast|bcast")),
    ("barrier", re.compile(r"barrier")),
    ("send_recv", re.compile(r"sendrecv|pushsend|pushrecv|collectivepermute")),
    ("recv", re.compile(r"^i?recv|receive")),
    ("send", re.compile(r"^i?send")),
    ("gather", re.compile(r"^gather")),
    ("scatter", re.compile(r"^scatter")),
    ("reduce", re.compile(r"^reduce")),
)
KINDS = ("", *(kind for kind, _ in _KINDS), "unknown")
"""All kinds of calls and kernels; "" is no communication."""
_EXPERTS = re.compile(
    r"(?:internode|internode_ll|intranode|hybrid_ep|elastic)::"
    r"|(?<![A-Za-z])Ep(?:Dispatch|Combine)(?:Intra|Inter)Node|moeA2A(?:Dispatch|Combine)Kernel",
    re.IGNORECASE,
)
_AWAITS_EXPERTS = re.compile(
    r"::(?:cached_)?notify(?:_dispatch|_combine)?\b|::rdma_sync_kernel|node::barrier\b|::clean_low_latency_buffer",
    re.IGNORECASE,
)
"""Kernels of DeepEP that end when all ranks have arrived, and move next to nothing."""
_TENSORS = re.compile(
    r"userbuffers|cross_device_reduce|quick_?reduce(?:_|::)|(?:one|two)_?shot|multimem_|allreduce_fusion", re.IGNORECASE
)


@lru_cache(maxsize=4096)
def kind_of(name: str) -> str:
    """The kind of a call such as ``_allgather_base``, ``allreduce_coalesced_`` or ``AllToAll``; "" for no communication."""
    squeezed = re.sub(r"[^a-z0-9]", "", name.lower())
    return next((kind for kind, pattern in _KINDS if pattern.search(squeezed)), "")


@lru_cache(maxsize=4096)
def kind_of_kernel(name: str) -> str:
    """The kind of a communication kernel: send_recv where it may be any of send, receive and all-to-all."""
    if _EXPERTS.search(name):
        return "barrier" if _AWAITS_EXPERTS.search(name) else "all_to_all"
    base = re.split(r"[<(]", name.removeprefix("void "), maxsplit=1)[0]
    base = re.sub(r"^nccl(?:Sym\w*?|Dev)?Kernel_|^hcom_", "", base)
    kind = kind_of(base)
    return "send_recv" if kind in P2P else kind or "unknown"


@lru_cache(maxsize=4096)
def hint_of_kernel(name: str) -> str:
    """The axis that a library's kernels serve; "" where it may be any."""
    return "ep" if _EXPERTS.search(name) else "tp" if _TENSORS.search(name) else ""
