"""Sizes shared by all tiny models: the smallest that the engines' kernels accept."""

VOCABULARY = 512
MAX_POSITION = 8192
RMS_EPS = 1e-6
ROPE_THETA = 10000.0

HIDDEN = 128
INTERMEDIATE = 256
HEADS = 4

# Multi-head latent attention. The latent and rope widths are those of the real models: cache layouts depend on them.
KV_LORA_RANK = 512
QK_ROPE = 64
QK_NOPE = 32
V_HEAD = 32
Q_LORA_RANK = 64

# Indexer. Its keys are quantised in groups of 128, so one head is one group, as in the real models.
INDEX_HEADS = 4
INDEX_HEAD = 128

# Mixture of experts, in the last layers only.
EXPERTS = 4
EXPERTS_PER_TOKEN = 2
MOE_INTERMEDIATE = 64
MOE_LAYERS = 2


def dense_mlp_layers(layers: int) -> int:
    """Number of leading layers with a dense MLP; the first layer always has one."""
    return max(1, layers - MOE_LAYERS)
