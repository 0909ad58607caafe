"""How much memory a CUDA device has left. Knows nothing of what it is for."""

from __future__ import annotations

import torch


def free_bytes(device: torch.device) -> int:
    """Bytes of ``device`` that can still be taken, as one piece mostly."""
    # What torch keeps of freed tensors is nobody's, but in pieces too small for what is asked for here; given back, it counts.
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
