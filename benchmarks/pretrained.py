"""A file of weights for ``[net] weights``: torchvision's ResNet-18, trained on CIFAR-100's subset.

    FEDTIDE_DATA=DIR python -m benchmarks.pretrained --out resnet18-cifar100.safetensors

A run on CIFAR-10 then begins with it, as benchmarks/studies/adapters.toml does. It stands in for
weights from ImageNet, which are a download.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.models import resnet18

from benchmarks.measure import parser_of
from fedcli.data.sets.registry import load
from fedmodels.config.data import Data


def main() -> None:
    """Train and write the file; print the accuracy on the test part."""
    parser = parser_of("pretrained", __doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    found = load(Data(name="cifar100"))
    mean = found.train.x.mean((0, 2, 3), keepdims=True) / 255
    std = found.train.x.std((0, 2, 3), keepdims=True) / 255
    train, test = (
        torch.from_numpy(((x / 255 - mean) / std).astype("float32"))
        for x in (found.train.x, found.test.x)
    )
    labels, true = map(torch.from_numpy, (found.train.y, found.test.y))
    torch.manual_seed(0)
    net: nn.Module = resnet18(num_classes=100)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    steps = options.epochs * (len(train) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    for epoch in range(options.epochs):
        net.train()
        order = torch.randperm(len(train))
        for batch in order[: len(order) // 64 * 64].split(64):
            x = train[batch]
            x = x.flip(-1) if torch.rand(()) < 0.5 else x
            optimizer.zero_grad()
            cross_entropy(net(x), labels[batch]).backward()
            optimizer.step()
            schedule.step()
        net.eval()
        with torch.no_grad():
            right = torch.cat([net(x).argmax(1) for x in test.split(500)]) == true
        print(f"epoch {epoch + 1}: {100 * right.float().mean():.1f} %", flush=True)
    save_file(net.state_dict(), options.out)
    print(f"kept {options.out}")


if __name__ == "__main__":
    main()
