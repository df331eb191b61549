"""Architecture of a decoder-only transformer, the target's and the drafter's alike."""

import dataclasses
import math

from jax.sharding import Mesh

QUANTIZATIONS = ("int8",)


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding: base `theta` and an optional frequency scaling; "ntk" enlarges the base by `factor ** (E / (E - 2))`."""

    theta: float = 10000.0
    scaling: str | None = None  # None | "linear" | "llama3" | "ntk"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Routed feed-forward layers: every token goes to its `experts_per_token` best experts, and none is dropped."""

    num_experts: int  # X
    experts_per_token: int
    intermediate_size: int  # width of one expert
    shared_size: int = 0  # width of the expert every token goes to; 0: there is none
    scores: str = "softmax"  # "softmax" | "sigmoid" of the router's output
    selection_bias: bool = False  # a bias per expert that takes part in choosing experts and not in weighing them
    normalize: bool = True  # weights of the chosen experts are divided by their sum
    scale: float = 1.0  # and multiplied by this
    dense_layers: tuple[int, ...] = ()  # layers that keep a plain feed-forward network
    names: str = "qwen3"  # what checkpoints call the tensors: "qwen3" | "hunyuan" | "hy3"
    mesh: Mesh | None = dataclasses.field(default=None, repr=False)  # over whose devices the experts are spread

    def __post_init__(self):
        for name in ("num_experts", "experts_per_token", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token ({self.experts_per_token}) is more than the {self.num_experts} experts there are")
        if self.scores not in ("softmax", "sigmoid"):
            raise ValueError(f"router scores must be softmax or sigmoid, got {self.scores!r}")


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
    moe: MoEConfig | None = None
    scan_layers: bool = False  # stacked weights under lax.scan (accelerators) or a tuple of layers (CPU)
    quantize: str | None = None  # "int8": the layers' matrices in 8 bits (int8.py)

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if self.quantize is not None and self.quantize not in QUANTIZATIONS:
            raise ValueError(f"quantize must be one of {', '.join(QUANTIZATIONS)} or nothing, got {self.quantize!r}")

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer routes its tokens to experts."""
        return self.moe is not None and layer not in self.moe.dense_layers

    def plain(self) -> "TransformerConfig":
        """The architecture alone, without how this model's weights are kept."""
        moe = None if self.moe is None else dataclasses.replace(self.moe, mesh=None)
        return dataclasses.replace(self, scan_layers=False, quantize=None, moe=moe)

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def attention_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)
