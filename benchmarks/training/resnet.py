"""A small residual network for small pictures."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

__all__ = ["ResNet"]


class Residual(nn.Module):
    """Two convolutions around which the input goes; the first one may halve both sides of the picture."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(channels_in, channels, stride)
        self.second = _convolution(channels, channels)
        self.shortcut: nn.Module = nn.Identity()
        if (channels_in, stride) != (channels, 1):
            self.shortcut = _convolution(channels_in, channels, stride, size=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, channels, height / stride, width / stride) for (batch, channels_in, height, width)."""
        inner = self.second(functional.relu(self.first(x)))
        return functional.relu(inner + self.shortcut(x))


class ResNet(nn.Module):
    """Tells classes of pictures apart: a convolution, then one residual block for each of ``widths``.

    From block to block the sides of the picture are halved. Widths (64, 128, 256) make 1.2 million parameters.
    """

    def __init__(self, channels: int = 1, widths: tuple[int, ...] = (64, 128, 256), classes: int = 10) -> None:
        super().__init__()
        self.stem = _convolution(channels, widths[0])
        strides = (1, *[2] * (len(widths) - 1))
        inputs = (widths[0], *widths)
        self.blocks = nn.Sequential(*(Residual(*sizes) for sizes in zip(inputs, widths, strides, strict=False)))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy, in nats, of ``labels`` (batch,) for ``pictures`` (batch, channels, h, w)."""
        features = self.blocks(functional.relu(self.stem(pictures))).mean((2, 3))
        return functional.cross_entropy(self.head(features), labels)


def _convolution(channels_in: int, channels: int, stride: int = 1, size: int = 3) -> nn.Sequential:
    convolution = nn.Conv2d(channels_in, channels, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels))
