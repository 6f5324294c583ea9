"""A vision transformer with a LoRA adapter: frozen weights stay at each site, the rest is sent."""

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import ViTConfig, ViTModel


class Adapted(nn.Module):
    """A ViT of two layers whose adapters and head learn.

    A real one is ``ViTModel.from_pretrained("a directory")``, with the same files at every site and
    at the coordinator. This one has drawn weights, the same everywhere by a seed of its own.
    """

    def __init__(self, num_classes: int = 10, input_shape: tuple[int, ...] = (1, 8, 8)) -> None:
        super().__init__()
        channels, size, _ = input_shape
        config = ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            image_size=size, patch_size=2, num_channels=channels,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2,
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(0)
            whole = ViTModel(config, add_pooling_layer=False)
            adapter = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
            self.base = get_peft_model(whole, adapter)
        self.head = nn.Linear(32, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the mean of the tokens, (B, 32)."""
        z: Tensor = self.base(pixel_values=x).last_hidden_state.mean(1)
        return z

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, K)."""
        logits: Tensor = self.head(self.features(x))
        return logits
