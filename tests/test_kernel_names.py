"""Room perf/tell/kernel_names.py: a kernel's short name can be recognised."""

import pytest

from perf.tell.kernel_names import MOST_CHARACTERS, short_name


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            (
                "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, "
                "std::array<char*, 1ul>>(int, at::native::FillFunctor<float>, std::array<char*, 1ul>)"
            ),
            "vectorized_elementwise_kernel<FillFunctor<float>, array>",
        ),
        (
            (
                "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::copy_cuda"
                "(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda(float)#1}>(at::Iterator&,"
                " float const&)::{lambda(int)#1}>(int, at::native::gpu_kernel_impl_nocast<float>)"
            ),
            "elementwise_kernel<gpu_kernel_impl_nocast<copy_cuda>>",
        ),
        (
            "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 9, false>(float*)",
            "softmax_warp_forward<BFloat16, float>",
        ),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", None),
        (
            "void cutlass::Kernel2<cutlass_80_gemm_bf16_256x128>(cutlass_80_gemm::Params)",
            "Kernel2<cutlass_80_gemm_bf16_256x128>",
        ),
        ("std::enable_if<!(false), void>::type gemv::kernel<int, __half, float>(int)", "kernel<__half, float>"),
        ("triton_poi_fused_add_mul_0", "triton_poi_fused_add_mul_0"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
        ("aten::mm", "aten::mm"),
        ("## Call CompiledFxGraph fzomo3qxdsxl52c", "## Call CompiledFxGraph"),
        ("x" * 200, "x" * 47 + "..." + "x" * 46),
        ("a<b", "a<b>"),
        (")(", ")"),
        ("(", "("),
        ("", ""),
    ],
)
def test_short_name_of_a_kernel_can_be_recognised(name, short):
    assert short_name(name) == (name.partition("(")[0] if short is None else short)
    assert len(short_name(name)) <= MOST_CHARACTERS
