"""Architecture of a decoder-only transformer, the target's and the drafter's alike."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding: base `theta` and an optional llama3 or linear frequency scaling."""

    theta: float = 10000.0
    scaling: str | None = None  # None | "linear" | "llama3"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Shape of a transformer; field names follow Hugging Face's config.json where they exist there."""

    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # G
    head_dim: int  # E
    rope: Rope = Rope()
    rms_norm_eps: float = 1e-6
    qk_norm: str | None = None  # None | "before_rope" (Qwen3) | "after_rope" (Hunyuan)
    attention_bias: bool = False  # Qwen2: bias on q, k and v
    tie_embeddings: bool = False
    sliding_window: int | None = None
    max_positions: int = 2048
    scan_layers: bool = False  # stacked weights under lax.scan (accelerators) or a tuple of layers (CPU)

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def attention_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)
