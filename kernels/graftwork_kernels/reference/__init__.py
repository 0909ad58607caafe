"""Every operator in plain torch, the specification that other implementations are held to. Leaves checking arguments to `ops`.

The module itself is an `graftwork_kernels.implementation.Implementation`.
"""

from graftwork_kernels.reference.attention import paged_attention, plan_attention, rotary_and_write_kv
from graftwork_kernels.reference.elementwise import add_rms_norm, gelu_and_mul, rms_norm, silu_and_mul
from graftwork_kernels.reference.linear import adapter_linear, embedding, linear, plan_adapters, prepare_weight
from graftwork_kernels.reference.penalties import apply_logit_bias, apply_penalties, finite_rows
from graftwork_kernels.reference.philox import philox_uniform
from graftwork_kernels.reference.sampling import sample, token_logprobs

__all__ = [
    "adapter_linear",
    "add_rms_norm",
    "apply_logit_bias",
    "apply_penalties",
    "embedding",
    "finite_rows",
    "gelu_and_mul",
    "linear",
    "paged_attention",
    "philox_uniform",
    "plan_adapters",
    "plan_attention",
    "prepare_weight",
    "rms_norm",
    "rotary_and_write_kv",
    "sample",
    "silu_and_mul",
    "token_logprobs",
]
