"""Classes of kernels and operators, by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from pptrace.model.pieces import CLASSES, WorkClass
from pptrace.model.tables import Int8

_KERNELS: Sequence[tuple[WorkClass, re.Pattern[str]]] = [
    (kind, re.compile(pattern))
    for kind, pattern in (
        (WorkClass.ELEMENTWISE, r"^triton_poi_"),  # the names of neighbours that were fused stand behind it
        (WorkClass.REDUCTION, r"^triton_(?:red|per)_"),
        (
            WorkClass.COPY,
            r"(?i)^mem(?:cpy|set)|copy_kernel|copy_device|CatArray|direct_copy|FillFunctor|transpose_?kernel|n(?:chw|hwc)ToN",
        ),
        (WorkClass.ATTENTION, r"(?i)fmha|flash|attention|_attn|attn_|sdpa|compute_dot_do_o|convert_dq_"),
        (
            WorkClass.MATMUL,
            r"(?i)gemm|gemv|nvjet|Cijk_|wgmma|xmma|splitK|cublas|cutlass|matmul|_mm_|\bdot_kernel|grouped_mm",
        ),
        (WorkClass.MATMUL, r"(?i)scudnn|[dw]grad|winograd|conv(?:olve|olution|\d?d)"),
        (WorkClass.LOSS, r"(?i)softmax|cross_?entropy|nll_?loss|NLLCriterion"),
        (WorkClass.NORM, r"(?i)(?:layer|rms|batch|group)_?norm|GammaBeta|RowwiseMoments|\bbn_[bf]w"),
        (WorkClass.NORM, r"\bln_[bf]wd|cu(?:ComputeGradInput|ApplyLayerNorm|ComputePartGrad)"),
        (WorkClass.OPTIMIZER, r"(?i)multi_tensor|adamw?|lamb_|_sgd|fused_?optim"),
        (
            WorkClass.EMBEDDING,
            r"(?i)embedding|compute_grad_weight|krn_partial|sum_and_scatter|indexSelect|index_select|indexing_backward|vectorized_gather|scatter_gather",
        ),
        (WorkClass.RANDOM, r"(?i)dropout|masked_scale|philox|distribution_|bernoulli|curand"),
        (
            WorkClass.REDUCTION,
            r"(?i)reduce_kernel|triton_(?:red|per)_|reduce_1Block|DeviceReduce|cub::.*[Rr]educe|\bsum_",
        ),
        (
            WorkClass.ELEMENTWISE,
            r"(?i)elementwise|pointwise|triton_poi|gelu|silu|swiglu|scalePackedTensor|rope|rotary|arange|elementWise",
        ),
    )
]
"""The first that matches is a kernel's class."""
_OPERATORS: Mapping[WorkClass, str] = {
    WorkClass.MATMUL: "mm bmm addmm baddbmm addbmm addmv addr mv dot linear matmul einsum grouped_mm scaled_mm convolution "
    "conv1d conv2d conv3d mkldnn_linear mkldnn_convolution slow_conv2d_forward slow_conv2d thnn_conv2d cudnn_convolution "
    "miopen_convolution convolution_overrideable",
    WorkClass.NORM: "layer_norm native_layer_norm batch_norm native_batch_norm group_norm native_group_norm rms_norm "
    "fused_rms_norm",
    WorkClass.LOSS: "softmax log_softmax nll_loss nll_loss_forward nll_loss_nd cross_entropy cross_entropy_loss "
    "mse_loss binary_cross_entropy binary_cross_entropy_with_logits smooth_l1_loss l1_loss huber_loss kl_div",
    WorkClass.EMBEDDING: "embedding embedding_dense embedding_renorm index index_select index_put index_put_impl gather "
    "scatter scatter_add index_add",
    WorkClass.RANDOM: "dropout native_dropout bernoulli random normal uniform rand randn randint randperm",
    WorkClass.REDUCTION: "sum mean max min amax amin argmax argmin norm linalg_vector_norm any all cumsum var var_mean std "
    "logsumexp prod topk sort",
    WorkClass.COPY: "copy to to_copy clone contiguous cat stack fill zero zeros zeros_like ones ones_like full full_like "
    "new_zeros new_empty new_empty_strided empty empty_like empty_strided resize select slice narrow_copy repeat pad "
    "constant_pad_nd local_scalar_dense item",
    WorkClass.ELEMENTWISE: "add sub mul div neg exp log log2 pow sqrt rsqrt tanh gelu silu relu sigmoid where masked_fill "
    "maximum minimum clamp clamp_min threshold eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or "
    "bitwise_not arange tril triu ceil floor abs reciprocal addcmul addcdiv lerp sin cos cumprod square rsub",
}
_OF_OPERATORS = {name: kind for kind, names in _OPERATORS.items() for name in names.split()}
_BARE = re.compile(r"^(?:aten|torch|prims)::_*|(?:_backward|_backward_data|_out|_jvp)?_?$")
_ATTENTION = re.compile(r"(?i)scaled_dot_product|(?:flash|efficient|cudnn|fused|self)_?attn|attention")
_OPTIMIZER = re.compile(r"Optimizer\.|aten::_(?:foreach|fused_adam|fused_sgd)")


def classes_of(names: Sequence[str], *, on_device: bool) -> Int8:
    """The class of each kernel, or on hosts of each operator, as its index in :data:`CLASSES`."""

    def class_of_kernel(name: str) -> WorkClass:
        return next((kind for kind, pattern in _KERNELS if pattern.search(name)), WorkClass.OTHER)

    found = map(class_of_kernel if on_device else _class_of_operator, names)
    return np.array([CLASSES.index(kind) for kind in found], dtype=np.int8)


def _class_of_operator(name: str) -> WorkClass:
    if _OPTIMIZER.match(name):
        return WorkClass.OPTIMIZER
    if _ATTENTION.search(name):
        return WorkClass.ATTENTION
    return _OF_OPERATORS.get(_BARE.sub("", name), WorkClass.OTHER)
