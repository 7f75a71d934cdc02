"""Datasheet peaks of devices, with their sources: one row per device as PyTorch sees it.

Figures are dense (no sparsity), at boost clock.  A device without a row has no peak: none is borrowed from another.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Datasheet:
    """One device.  Rates in TFLOP/s (None: no such path, or sources that disagree), bandwidth in 10^9 bytes/s."""

    name: str  # as in torch.cuda.get_device_name, or its beginning
    arch: str  # gcnArchName without features, or sm_XY
    compute_units: int | None  # multiprocessors, as torch counts them
    memory_mb: int  # 2^20 bytes, as memory_source reads it; drivers differ by some 10 MB
    memory_source: str
    fp32: float | None
    tf32: float | None
    bf16: float | None
    fp16: float | None
    bandwidth: float
    source: str

    @property
    def fp8(self) -> float | None:
        """Twice bf16, as the datasheets of all these parts have it."""
        return self.bf16 and 2 * self.bf16 if self.arch in _WITH_FP8 else None


_WITH_FP8 = ("gfx942", "gfx950", "sm_89", "sm_90", "sm_100", "sm_103")
_MI100 = "rocm.docs.amd.com/en/latest/conceptual/gpu-arch/mi100.html"
_MI210 = "AMD Instinct MI210 brochure"
_MI250 = "rocm.docs.amd.com/en/latest/conceptual/gpu-arch/mi250.html, one GCD"
_MI250X = "amd.com/en/products/accelerators/instinct/mi200/mi250x.html, one GCD"
_MI300A, _MI300X, _MI325X = (f"AMD Instinct {part} data sheet, amd.com" for part in ("MI300A", "MI300X", "MI325X"))
_MI350X, _MI355X = (f"AMD Instinct {part} brochure, amd.com" for part in ("MI350X", "MI355X"))
_HALF = "half of the figure with sparsity"
_NVIDIA = f"NVIDIA product page, as in github.com/stas00/ml-engineering compute/accelerator; {_HALF}"
_H100 = f"resources.nvidia.com/en-us-gpu-resources/h100-datasheet-24306; {_HALF}"
_B300 = f"NVIDIA HGX B300, as in glennklockwood.com/garden/processors/B300; {_HALF}"
_V100, _T4, _A100 = "NVIDIA V100 datasheet", "NVIDIA T4 product page", "NVIDIA A100 white paper"
_A100_PCIE = "NVIDIA A100 datasheet, as in github.com/stas00/ml-engineering compute/accelerator"
_RTX3090, _RTX4090 = "NVIDIA GA102 white paper, FP32 sums", "NVIDIA Ada white paper 2.1, FP32 sums"
_L4, _L40S = f"NVIDIA L4 datasheet; {_HALF}", f"nvidia.com/en-us/data-center/l40s; {_HALF}"
_RDNA3 = "AMD GPUOpen: 96 units x 512 FLOPs a clock; fp32 and bandwidth from the review at guru3d.com"
# What is sold as 80 GB is neither 80 x 10^9 nor 80 x 2^30 bytes, so the memory is what a tool reports of a card.
_TORCH = "total_memory in torch.cuda.get_device_properties"
_OOM = "total capacity, to 0.01 GiB, in PyTorch's out-of-memory message"
_TRACE = "totalGlobalMem in a trace, AMD-AGI/TraceLens"
_OOM_V100 = f"{_OOM}, liucongg/ChatGLM-Finetuning#73"
_OOM_NVL, _OOM_GH200 = f"{_OOM}, ali-vilab/VACE#56", f"{_OOM}, Lightning-AI/litgpt#1892"
_QUERY = "deviceQuery of CUDA, bottlerocket-os/bottlerocket#3873"
_ROCM_SMI = "VRAM Total Memory of rocm-smi"
_NVIDIA_SMI = "memory.total of nvidia-smi, as in modal-labs/modal-client#2797: PyTorch reports up to 2% less"
_SOLD = "as sold, 128 x 10^9 bytes: shared with the host, and no reading is known"
# fp32 on AMD Instinct is the rate of its matrix units (MFMA), which is what a float32 matmul can reach.
DATASHEETS = (
    Datasheet("AMD Instinct MI100", "gfx908", 120, 32_752, _ROCM_SMI, 46.1, None, 92.3, 184.6, 1228.8, _MI100),
    Datasheet("AMD Instinct MI210", "gfx90a", 104, 65_520, _TORCH, 45.3, None, 181.0, 181.0, 1600, _MI210),
    Datasheet("AMD Instinct MI250", "gfx90a", 104, 65_520, _TORCH, 45.3, None, 181.0, 181.0, 1600, _MI250),
    Datasheet("AMD Instinct MI250X", "gfx90a", 110, 65_520, _TORCH, 47.9, None, 191.5, 191.5, 1600, _MI250X),
    Datasheet("AMD Instinct MI300A", "gfx942", 228, 122_070, _SOLD, 122.6, 490.3, 980.6, 980.6, 5300, _MI300A),
    Datasheet("AMD Instinct MI300X", "gfx942", 304, 196_592, _TORCH, 163.4, 653.7, 1307.4, 1307.4, 5300, _MI300X),
    Datasheet("AMD Instinct MI325X", "gfx942", 304, 262_123, _OOM, 163.4, 653.7, 1307.4, 1307.4, 6000, _MI325X),
    Datasheet("AMD Instinct MI350X", "gfx950", 256, 294_896, _ROCM_SMI, 144.2, None, 2306.9, 2306.9, 8000, _MI350X),
    Datasheet("AMD Instinct MI355X", "gfx950", 256, 294_896, _ROCM_SMI, 157.3, None, 2516.6, 2516.6, 8000, _MI355X),
    Datasheet("AMD Radeon RX 7900 XTX", "gfx1100", None, 24_560, _ROCM_SMI, 61.4, None, 122.9, 122.9, 960, _RDNA3),
    Datasheet("Tesla V100-SXM2-16GB", "sm_70", 80, 16_160, _TORCH, 15.7, None, None, 125.0, 900, _V100),
    Datasheet("Tesla V100-PCIE-16GB", "sm_70", 80, 16_160, _TORCH, 14.0, None, None, 112.0, 900, _V100),
    Datasheet("Tesla V100-SXM2-32GB", "sm_70", 80, 32_501, _OOM_V100, 15.7, None, None, 125.0, 900, _V100),
    Datasheet("Tesla T4", "sm_75", 40, 15_102, _TORCH, 8.1, None, None, 65.0, 320, _T4),
    Datasheet("NVIDIA A100-SXM4-40GB", "sm_80", 108, 40_339, _QUERY, 19.5, 156.0, 312.0, 312.0, 1555, _A100),
    Datasheet("NVIDIA A100-SXM4-80GB", "sm_80", 108, 81_920, _NVIDIA_SMI, 19.5, 156.0, 312.0, 312.0, 2039, _A100),
    Datasheet("NVIDIA A100-PCIE-40GB", "sm_80", 108, 40_326, _TORCH, 19.5, 156.0, 312.0, 312.0, 1555, _A100_PCIE),
    Datasheet("NVIDIA A100 80GB PCIe", "sm_80", 108, 81_920, _NVIDIA_SMI, 19.5, 156.0, 312.0, 312.0, 1935, _A100_PCIE),
    Datasheet("NVIDIA H100 80GB HBM3", "sm_90", 132, 81_089, _TORCH, 67.0, 494.7, 989.4, 989.4, 3350, _H100),
    Datasheet("NVIDIA H100 PCIe", "sm_90", 114, 81_008, _TORCH, 51.0, 378.0, 756.0, 756.0, 2000, _H100),
    Datasheet("NVIDIA H100 NVL", "sm_90", 132, 95_232, _OOM_NVL, 60.0, 417.5, 835.5, 835.5, 3900, _NVIDIA),
    Datasheet("NVIDIA H200", "sm_90", 132, 143_156, _TORCH, 67.0, 494.5, 989.0, 989.0, 4800, _NVIDIA),
    Datasheet("NVIDIA GH200 480GB", "sm_90", 132, 97_157, _OOM_GH200, 67.0, 494.5, 989.0, 989.0, 4000, _NVIDIA),
    # Sources disagree on FP32 of B200 and B300, 75 or 80: left out.
    Datasheet("NVIDIA B200", "sm_100", 148, 182_631, _TORCH, None, 1125.0, 2250.0, 2250.0, 8000, _NVIDIA),
    Datasheet("NVIDIA B300 SXM6 AC", "sm_103", 148, 274_115, _TRACE, None, 1125.0, 2250.0, 2250.0, 8000, _B300),
    Datasheet("NVIDIA GeForce RTX 3090", "sm_86", 82, 24_259, _TORCH, 35.6, 35.6, 71.0, 71.0, 936, _RTX3090),
    Datasheet("NVIDIA GeForce RTX 4090", "sm_89", 128, 24_563, _TORCH, 82.6, 82.6, 165.2, 165.2, 1008, _RTX4090),
    Datasheet("NVIDIA L4", "sm_89", 58, 22_558, _OOM, 30.3, 60.0, 121.0, 121.0, 300, _L4),
    Datasheet("NVIDIA L40S", "sm_89", 142, 45_589, _TORCH, 91.6, 183.0, 362.0, 362.0, 864, _L40S),
)
# 10^9 bytes/s of a GPU's links to the others of its node, one way: half of the sum that the datasheets give.
LINKS = {"Tesla V100-SXM2": 150, "NVIDIA A100-SXM4": 300, "NVIDIA H100 80GB HBM3": 450, "NVIDIA H200": 450}
LINKS |= {"NVIDIA B200": 900, "NVIDIA B300": 900, "AMD Instinct MI300X": 448, "AMD Instinct MI325X": 448}
LINKS |= {"AMD Instinct MI350X": 537.6, "AMD Instinct MI355X": 537.6}
