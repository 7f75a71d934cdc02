"""What does the name of a kernel that multiplies tell beside that: types, tiles, what it is for?"""

import re
from functools import cache

# The first pattern that is found tells what is multiplied, as operator_costs.factor_type names it, or tf32.  Sums and
# outputs are often named too: what is narrower comes first.
_TYPES = {
    "fp4": r"e2m1|(mx|nv)?fp4|nvf4",
    "c10::Float8_e4m3fn": r"e4m3|e5m2|fp8|float8|_f8|nvjet_(sm\d+_)?[a-z]*q|int8|_[is]8_|w8a8|a8w8",
    "tf32": r"tf32|s1688(gemm|cudnn)_(?!b?f)|xf32|nvjet_(sm\d+_)?ss",
    "c10::BFloat16": r"bf16|bfloat|_bbs|_bss|nvjet_(sm\d+_)?t|DF16b",
    "c10::Half": r"half|fp?16|_hhs|_hss|h884|h1688|h16816|hgemm|nvjet_(sm\d+_)?h|DF16_",
    "float": r"sgemm|float|fp?32|_sb_|_s_b|ffma|scudnn",
}
# A tile of the output, M and N; in names of CUTLASS the shape of the instruction comes before it.
_TILE = re.compile(r"(?:_t?|_MT|_bt|tilesize|tile)(\d+)x(\d+)(?!\d*gemm)", re.IGNORECASE)
MISALIGNED = r"_align[12](_|\b)"  # loads two or four bytes at a time, as the dimensions allow no more
# Of the kernels that an operator launches beside the one that multiplies: they move elements, or add parts up.
HELPER, SKINNY, SHORT_QUERIES, GROUPED = "helper", "skinny", "short queries", "grouped"
_USES = {
    HELPER: r"splitk_?reduce|reduce_?kernel|(pre|post)process|convert_?dq|combine|transpose|im2col|col2im|routing"
    r"|finalize|permute|align_block|dot_do_o|quant_kernel",
    SKINNY: r"gemv|wvsplitk|skinny|llmm1|dot_kernel|reduce_1block|depthwise|dwconv|mul_mat_vec|causal_conv1d",
    SHORT_QUERIES: r"paged_?attention|decode|splitkv|single_query|ll4mi|mmha|masked_multihead|flash_?mla|flash_fwd_mla"
    r"|_kernel_stage[12]|unified_attention_3d|ForGen|qseqlen1\b",
    GROUPED: r"moe|grouped|matmul_ogs|group_gemm",
}


@cache
def multiplied_type(name: str) -> str | None:
    """The type that a kernel of this name multiplies; None: the name does not tell."""
    return next((kind for kind, pattern in _TYPES.items() if re.search(pattern, name, re.IGNORECASE)), None)


@cache
def tile(name: str) -> tuple[int, int] | None:
    """The tile of the output that a block of this kernel computes."""
    found = _TILE.search(name)
    return (int(found[1]), int(found[2])) if found else None


@cache
def use(name: str) -> str | None:
    """HELPER, SKINNY, SHORT_QUERIES or GROUPED, if the name tells one."""
    return next((one for one, pattern in _USES.items() if re.search(pattern, name, re.IGNORECASE)), None)
