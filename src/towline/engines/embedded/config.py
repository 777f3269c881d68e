"""The shape of a decoder, read from and written to a Hugging Face `config.json`.

Invariant: whatever a config specifies that the decoder would not compute faithfully (another activation, sliding
windows, quantised weights, an unknown rotary scaling) is refused here, so a model that loads is the model that was
saved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from towline.errors import ConfigError

FAMILIES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
"""Supported model types, with their Hugging Face class."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are scaled for long contexts."""

    kind: str
    """`linear` or `llama3`."""
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    """The context before scaling; only `llama3` uses this and the two factors above."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Biases on all four attention projections; `qwen2` has them on queries, keys and values whatever this says."""
    mlp_bias: bool = False
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if self.model_type not in FAMILIES:
            raise ConfigError(f"model_type {self.model_type!r} is not one of {', '.join(sorted(FAMILIES))}")
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        for name in (*sizes, "num_key_value_heads", "head_dim", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd: rotary positions need pairs")

    @property
    def qkv_bias(self) -> bool:
        return self.model_type == "qwen2" or self.attention_bias

    @property
    def output_bias(self) -> bool:
        return self.model_type != "qwen2" and self.attention_bias

    @property
    def qk_norm(self) -> bool:
        return self.model_type == "qwen3"

    @classmethod
    def from_folder(cls, folder: Path) -> DecoderConfig:
        path = folder / "config.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{path} does not hold a JSON object")
        try:
            return cls.from_json(data)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DecoderConfig:
        """Read the fields of a `config.json`, with the defaults of its family where Hugging Face has them."""
        model_type = str(data.get("model_type", ""))
        if model_type not in FAMILIES:
            raise ConfigError(f"model_type {model_type!r} is not one of {', '.join(sorted(FAMILIES))}")
        _refuse_unsupported(data)
        try:
            hidden, heads = int(data["hidden_size"]), int(data["num_attention_heads"])
            theta, scaling = _rope(data)
            return cls(
                model_type=model_type,
                vocab_size=int(data["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=int(data["intermediate_size"]),
                num_hidden_layers=int(data["num_hidden_layers"]),
                num_attention_heads=heads,
                num_key_value_heads=int(data.get("num_key_value_heads") or heads),
                head_dim=int(data.get("head_dim") or (128 if model_type == "qwen3" else hidden // heads)),
                max_position_embeddings=int(
                    data.get("max_position_embeddings", 2048 if model_type == "llama" else 32768)
                ),
                rms_norm_eps=float(data.get("rms_norm_eps", 1e-6)),
                rope_theta=theta,
                rope_scaling=scaling,
                tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
                attention_bias=bool(data.get("attention_bias", False)),
                mlp_bias=bool(data.get("mlp_bias", False)) and model_type == "llama",
                initializer_range=float(data.get("initializer_range", 0.02)),
            )
        except KeyError as error:
            raise ConfigError(f"the field {error} is missing") from error
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(f"a field cannot be used: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """The fields from which Hugging Face reads back the same model."""
        data: dict[str, Any] = {
            "architectures": [FAMILIES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "initializer_range": self.initializer_range,
            "torch_dtype": "float32",
        }
        if self.rope_scaling is not None:
            scaling = self.rope_scaling
            data["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
            if scaling.kind == "llama3":
                data["rope_scaling"] |= {
                    "low_freq_factor": scaling.low_freq_factor,
                    "high_freq_factor": scaling.high_freq_factor,
                    "original_max_position_embeddings": scaling.original_context,
                }
        return data


def _refuse_unsupported(data: Mapping[str, Any]) -> None:
    activation = data.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"hidden_act {activation!r} is not supported, only 'silu'")
    if data.get("use_sliding_window") or "sliding_attention" in (data.get("layer_types") or ()):
        raise ConfigError("sliding-window attention is not supported")
    if data.get("quantization_config"):
        raise ConfigError("quantised weights are not supported: save the model in float32 or bfloat16")
    if data.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("partial rotary positions are not supported")


def _rope(data: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (newer) or `rope_theta` and `rope_scaling` (older)."""
    fields: Mapping[str, Any] = data.get("rope_parameters") or data.get("rope_scaling") or {}
    theta = float(fields.get("rope_theta", data.get("rope_theta", 10000.0)))
    kind = str(fields.get("rope_type", fields.get("type", "default")))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind, float(fields["factor"]))
    if kind == "llama3":
        return theta, RopeScaling(
            kind,
            float(fields["factor"]),
            float(fields["low_freq_factor"]),
            float(fields["high_freq_factor"]),
            int(fields["original_max_position_embeddings"]),
        )
    raise ConfigError(f"rotary scaling {kind!r} is not supported, only 'default', 'linear' and 'llama3'")
