"""Classes of kernels and operators by names that real recordings have."""

from __future__ import annotations

import pytest

from pptrace.model.device import CLASSES, WorkClass
from pptrace.recognise.pieces import classes_of

KERNELS = {
    "sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize32x32x8": WorkClass.MATMUL,
    "nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_TNT": WorkClass.MATMUL,
    "Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV": WorkClass.MATMUL,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": WorkClass.MATMUL,
    "volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1": WorkClass.MATMUL,
    "pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel": WorkClass.ATTENTION,
    "fmha_cutlassF_f32_aligned_64x64_rf_sm80": WorkClass.ATTENTION,
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel": WorkClass.NORM,
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward": WorkClass.LOSS,
    "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d": WorkClass.LOSS,
    "void at::native::(anonymous namespace)::embedding_backward_feature_kernel": WorkClass.EMBEDDING,
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel": WorkClass.OPTIMIZER,
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl": WorkClass.ELEMENTWISE,
    "triton_poi_fused_add_gelu_3": WorkClass.ELEMENTWISE,
    "triton_red_fused_sum_2": WorkClass.REDUCTION,
    "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float>": WorkClass.REDUCTION,
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda": WorkClass.COPY,
    "triton_poi_fused_convolution_relu_0": WorkClass.ELEMENTWISE,
    "triton_per_fused__softmax_1": WorkClass.REDUCTION,
    "void cudnn::ops::nchwToNhwcKernel<float, float, float, true>": WorkClass.COPY,
    "cudnn::fusion::compute_dot_do_o<false, true>": WorkClass.ATTENTION,
    "void at::native::(anonymous namespace)::sum_and_scatter<float>": WorkClass.EMBEDDING,
    "void (anonymous namespace)::cunn_ClassNLLCriterion_updateOutput_kernel": WorkClass.LOSS,
    "void transformer_engine::normalization::ln_fwd_tuned_kernel": WorkClass.NORM,
    "my_own_kernel": WorkClass.OTHER,
}
OPERATORS = {
    "aten::addmm": WorkClass.MATMUL,
    "aten::mm": WorkClass.MATMUL,
    "aten::convolution_backward": WorkClass.MATMUL,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": WorkClass.ATTENTION,
    "aten::native_layer_norm_backward": WorkClass.NORM,
    "aten::_log_softmax_backward_data": WorkClass.LOSS,
    "aten::nll_loss_forward": WorkClass.LOSS,
    "aten::mse_loss_backward": WorkClass.LOSS,
    "aten::thnn_conv2d": WorkClass.MATMUL,
    "aten::embedding_dense_backward": WorkClass.EMBEDDING,
    "aten::_foreach_add_": WorkClass.OPTIMIZER,
    "Optimizer.step#AdamW.step": WorkClass.OPTIMIZER,
    "aten::gelu_backward": WorkClass.ELEMENTWISE,
    "aten::add_": WorkClass.ELEMENTWISE,
    "aten::sum": WorkClass.REDUCTION,
    "aten::copy_": WorkClass.COPY,
    "aten::zero_": WorkClass.COPY,
    "aten::native_dropout": WorkClass.RANDOM,
    "user::op": WorkClass.OTHER,
}


@pytest.mark.parametrize(("named", "on_device"), [(KERNELS, True), (OPERATORS, False)])
def test_names_tell_the_kind_of_work(named: dict[str, WorkClass], on_device: bool) -> None:
    found = classes_of(list(named), on_device=on_device)
    assert {name: CLASSES[code] for name, code in zip(named, found.tolist(), strict=True)} == named
